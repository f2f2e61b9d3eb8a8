"""Two halves of a batch that take turns on each rank of a stage.

While one half waits for parts of other ranks, the other half computes. Each half has a thread, and
only one of the two runs at a time. A half keeps the turn until it has sent its part of an exchange
(`StageRanks`) or ends. So the exchanges of the halves alternate, in the same order on all ranks.
The halves are rows of the batch, each planned separately. No sum of a row depends on other rows, so
the bits equal those of the whole batch.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode

Half = Callable[[], StageOutput]


def after_both(done: Callable[[int], None]) -> Callable[[int], None]:
    """Return a callback for both halves of a batch, which calls `done` once for each layer.

    Either half may be the later one: the half with more rows, or with rows of adapters, may need
    more exchanges in a layer than the other.
    """
    by_one: set[int] = set()

    def layer_done(layer_id: int) -> None:
        if layer_id in by_one:
            done(layer_id)
        by_one.add(layer_id)

    return layer_done


class Overlap:
    """A runner of two halves. The engine thread owns it; halves call `pass_turn`."""

    def __init__(self, min_tokens: int) -> None:
        """Create a runner that splits batches of at least `min_tokens` tokens."""
        self._min_tokens = min_tokens
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="second-half")
        self._turns = threading.Semaphore(0), threading.Semaphore(0)
        self._has_turn = 0
        self._is_over = [True, True]
        self._error: Exception | None = None

    def middle(self, batch: ForwardBatch) -> int | None:
        """Return the first row of the second half, or None to run the batch whole.

        The halves have about the same number of tokens. Batches with trees are not split, so steps
        of a speculating pool run whole.
        """
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
        """Run both halves by turns and join their outputs.

        If a half fails, the other half ends too, and the first error is raised.
        """
        self._is_over = [False, False]
        self._error = None
        self._has_turn = 0
        later = self._threads.submit(self._run_half, 1, second)
        try:
            before = self._run_half(0, first)
        finally:
            wait((later,))
        return before.joined(later.result())

    def pass_turn(self) -> None:
        """Let the other half run until it passes the turn back or ends. Only a half may call it.

        A half waits only for other ranks, and those waits have deadlines.
        """
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
