"""Which grammars a worker or router accepts, and the processes of those whose masks it computes.

A new grammar gets a short time of computing first, and only if that does not do, a longer one, for which few may wait:
so a flood of grammars that compile slowly costs those that compile fast a tenth of a second each, not their turn.
What was refused is kept, as is what was accepted.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLTokenizer

from runtime.errors import CapacityError, InvalidRequestError
from runtime.grammar.children import GrammarNursery
from runtime.grammar.language import Grammar, check_shape, shown
from runtime.grammar.process import GrammarProcess, GuidedText, TooSlow
from runtime.tokenizer_files import find_tokenizer

logger = logging.getLogger(__name__)

FIRST_CPU_S, LAST_CPU_S = 0.1, 1.0  # of computing, for a grammar of usual size and for the slowest that is accepted
MAX_AT_ONCE, MAX_WAITING = 4, 32
MAX_SLOW_AT_ONCE, MAX_SLOW_WAITING = 2, 8
WAIT_S = 10.0  # for a turn
MAX_REMEMBERED = 4096  # verdicts
REMEMBER_S = 600.0  # a refusal for its cost; a newer machine may be faster
MAX_PROCESSES = 64


@dataclass
class _Lane:
    """Compilations of one length: so many at once, so many that wait. Belongs to an event loop."""

    cpu_limit_s: float
    max_waiting: int
    turns: asyncio.Semaphore
    num_waiting: int = 0

    async def take_turn(self) -> None:
        """Raises CapacityError; else `turns` is to be released."""
        if self.turns.locked() and self.num_waiting >= self.max_waiting:
            raise CapacityError(f"{self.num_waiting} grammars wait to be compiled, which is the limit",
                                resource="grammar compiler")
        self.num_waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self.turns.acquire()
        except TimeoutError:
            raise CapacityError(f"other grammars kept the compiler busy for {WAIT_S:g} s, the limit of waiting",
                                resource="grammar compiler") from None
        finally:
            self.num_waiting -= 1


@dataclass
class _Verdicts:
    """What is known of grammars, the latest of them. Under the owner's lock."""

    known: OrderedDict[bytes, tuple[str, float]] = field(default_factory=OrderedDict)  # why not, and until when

    def find(self, grammar: Grammar) -> bool:
        """Whether it was accepted. Raises InvalidRequestError if it was refused."""
        found = self.known.get(grammar.digest)
        if found is None:
            return False
        problem, until_s = found
        if problem and time.monotonic() < until_s:
            raise grammar.refused(problem)
        self.known.move_to_end(grammar.digest)
        return not problem

    def remember(self, grammar: Grammar, problem: str = "") -> None:
        self.known[grammar.digest] = problem, time.monotonic() + REMEMBER_S
        self.known.move_to_end(grammar.digest)
        while len(self.known) > MAX_REMEMBERED:
            self.known.popitem(last=False)


class Grammars:
    """Grammars over one vocabulary. `check` belongs to an event loop, `open` and what it gives to one thread."""

    def __init__(self, tokenizer_json: Path, end_token_ids: Sequence[int], *, computes_masks: bool = True) -> None:
        """Without `computes_masks` a grammar's process ends with its verdict."""
        self._nursery = GrammarNursery(tokenizer_json, end_token_ids)
        self._computes_masks = computes_masks
        self._lock = threading.Lock()
        self._verdicts = _Verdicts()
        self._processes: OrderedDict[Grammar, GrammarProcess] = OrderedDict()
        self._checks: dict[Grammar, asyncio.Task[None]] = {}
        self._lanes: tuple[_Lane, _Lane] | None = None
        self._keys = itertools.count(1)

    async def check(self, grammar: Grammar) -> None:
        """Compile it elsewhere, so that `open` finds it ready.

        Raises:
            InvalidRequestError: naming the field and the limit, if it is no grammar, is not supported, or takes too
                long.
            CapacityError: too many others wait to be compiled, or its turn has not come in time.
            UnavailableError: no process for it could be started.
        """
        with self._lock:
            if self._verdicts.find(grammar) and (not self._computes_masks or grammar in self._processes):
                return
        check_shape(grammar)
        if (task := self._checks.get(grammar)) is None:
            task = self._checks[grammar] = asyncio.create_task(self._check(grammar))
            task.add_done_callback(lambda ended: self._checked(grammar, ended))
        await asyncio.shield(task)  # others may wait for the same

    def open(self, grammar: Grammar) -> GuidedText:
        """A text that has not begun. Its process is one that `check` made ready, or a new one that compiles first."""
        with self._lock:
            process = self._processes.get(grammar)
            if process is None:
                process = self._keep(grammar, GrammarProcess(self._nursery, grammar, LAST_CPU_S, stays=True))
            self._processes.move_to_end(grammar)
            return GuidedText(process, next(self._keys))

    def close(self) -> None:
        """End all processes; what still waits for them fails."""
        with self._lock:
            processes = list(self._processes.values())
            self._processes.clear()
        self._nursery.close()
        for process in processes:
            process.close()

    async def _check(self, grammar: Grammar) -> None:
        if self._lanes is None:
            self._lanes = (_Lane(FIRST_CPU_S, MAX_WAITING, asyncio.Semaphore(MAX_AT_ONCE)),
                           _Lane(LAST_CPU_S, MAX_SLOW_WAITING, asyncio.Semaphore(MAX_SLOW_AT_ONCE)))
        first, last = self._lanes
        try:
            try:
                process = await self._compile(grammar, first)
            except TooSlow:
                process = await self._compile(grammar, last)
        except InvalidRequestError as error:
            with self._lock:
                self._verdicts.remember(grammar, error.violations[0].description)
            raise
        with self._lock:
            self._verdicts.remember(grammar)
            if self._computes_masks:
                self._keep(grammar, process)

    async def _compile(self, grammar: Grammar, lane: _Lane) -> GrammarProcess:
        await lane.take_turn()
        process = None
        try:
            process = GrammarProcess(self._nursery, grammar, lane.cpu_limit_s, stays=self._computes_masks)
            await asyncio.wrap_future(process.compiled)
            return process
        except BaseException:
            if process is not None:
                process.close()
            raise
        finally:
            lane.turns.release()

    def _checked(self, grammar: Grammar, ended: "asyncio.Task[None]") -> None:
        del self._checks[grammar]
        if not ended.cancelled():
            ended.exception()  # the waiters have it

    def _keep(self, grammar: Grammar, process: GrammarProcess) -> GrammarProcess:
        """Under the lock. Beyond the limit idle ones end, those not used for longest first."""
        if (other := self._processes.pop(grammar, None)) is not None:
            other.close()
        self._processes[grammar] = process
        idle = [known for known, held in self._processes.items() if held.num_texts == 0 and held is not process]
        self._end(idle[:max(0, len(self._processes) - MAX_PROCESSES)])
        return process

    def _end(self, grammars: Iterable[Grammar]) -> None:
        for grammar in grammars:
            self._processes.pop(grammar).close()


def load_grammars(model_dir: Path, eos_token_ids: Sequence[int], *, computes_masks: bool = True) -> Grammars | None:
    """For the vocabulary of the model's tokenizer; None where structured output cannot be offered: without a
    tokenizer, or without end-of-sequence tokens in its vocabulary, with which a text could end."""
    path = find_tokenizer(model_dir)
    if path is None or not eos_token_ids:
        return None
    try:
        LLTokenizer(str(path), eos_token=list(eos_token_ids))
    except ValueError as error:
        logger.warning("structured output is not offered, %s does not serve for it: %s", path, shown(str(error)))
        return None
    return Grammars(path, eos_token_ids, computes_masks=computes_masks)

