"""Two halves of a batch that take turns on each rank of a stage: while the parts that one has sent
are under way, and other ranks compute theirs, the other half computes.

Each half has a thread, and one of the two runs at a time: a half has the turn until it has sent its
part of an exchange (`StageRanks`) or is over. So the halves' exchanges alternate, in the same order
on all ranks. The halves are rows of the batch, each planned by itself, and no row's sums depend on
other rows: the bits are those of the whole batch.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode

Half = Callable[[], StageOutput]


class Overlap:
    """Belongs to the engine thread, but for `pass_turn`, which halves call."""

    def __init__(self, min_tokens: int) -> None:
        """Batches of fewer tokens are not split."""
        self._min_tokens = min_tokens
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="second-half")
        self._turns = threading.Semaphore(0), threading.Semaphore(0)
        self._has_turn = 0
        self._is_over = [True, True]
        self._error: Exception | None = None

    def middle(self, batch: ForwardBatch) -> int | None:
        """The first row of the second half, with halves of about as many tokens; None where the
        batch runs whole. Steps of a pool that speculates do: their trees are not split."""
        is_plain = (
            batch.mode in (ForwardMode.PREFILL, ForwardMode.DECODE) and batch.spec_info is None
        )
        if batch.num_tokens < self._min_tokens or batch.num_rows < 2 or not is_plain:
            return None
        ends = list(accumulate(batch.query_lens))
        return min(
            range(1, batch.num_rows), key=lambda row: abs(2 * ends[row - 1] - batch.num_tokens)
        )

    def run(self, first: Half, second: Half) -> StageOutput:
        """Both, by turns. Raises what the first of them raised that did; the other ends with it."""
        self._is_over, self._error, self._has_turn = [False, False], None, 0
        later = self._threads.submit(self._run_half, 1, second)
        try:
            before = self._run_half(0, first)
        finally:
            wait((later,))
        return before.joined(later.result())

    def pass_turn(self) -> None:
        """In a half: the other goes on until it passes the turn back, or is over. Elsewhere
        nothing. Waits of halves are waits for other ranks, which have deadlines."""
        own = self._has_turn
        if not self._is_over[1 - own]:
            self._turns[1 - own].release()
            self._take_turn(own)

    def _run_half(self, place: int, half: Half) -> StageOutput:
        try:
            if place:
                self._take_turn(place)
            return half()
        except Exception as error:
            self._error = self._error or error
            raise
        finally:
            self._is_over[place] = True
            if not self._is_over[1 - place]:
                self._turns[1 - place].release()

    def _take_turn(self, place: int) -> None:
        self._turns[place].acquire()
        self._has_turn = place
        if self._error is not None:
            raise self._error
