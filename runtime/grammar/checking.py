"""Which grammars a worker or router accepts, and the processes of those whose masks it computes.

A new grammar gets a short time of computing first, and only if that does not do, a longer one, for
which few may wait: so a flood of grammars that compile slowly costs those that compile fast a tenth
of a second each, not their turn. What was refused is kept, as is what was accepted.
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

from runtime.errors import InvalidRequestError
from runtime.grammar.children import GrammarForkServer
from runtime.grammar.language import Grammar, check_shape, shown
from runtime.grammar.process import GrammarProcess, GuidedText, TooSlow
from runtime.grammar.turns import Allowances, Turns
from runtime.model_files.tokenizer_files import find_tokenizer
from runtime.process.host_cores import num_cores

logger = logging.getLogger(__name__)

FIRST_CPU_S, LAST_CPU_S = (
    0.1,
    1.0,
)  # of computing, for a grammar of usual size and for the slowest that is accepted
MAX_AT_ONCE, MAX_WAITING = 4, 32
MAX_SLOW_AT_ONCE, MAX_SLOW_WAITING = 2, 8
MAX_REMEMBERED = 4096  # verdicts
REMEMBER_S = 600.0  # a refusal for its cost; a newer machine may be faster
# new grammars of a client, of which each takes about ten milliseconds on routers and on workers
PER_CORE_S = 4.0
MAX_PROCESSES = 64  # that nobody uses
MAX_EXPECTED, EXPECTED_S = (
    128,
    30.0,
)  # kept for requests that have had their grammars checked, and for how long


@dataclass(frozen=True)
class _Lane:
    """Compilations of one length. Belongs to an event loop."""

    cpu_limit_s: float
    turns: Turns


@dataclass
class _Verdicts:
    """What is known of grammars, the latest of them. Under the owner's lock."""

    known: OrderedDict[bytes, tuple[str, float]] = field(
        default_factory=OrderedDict
    )  # why not, and until when

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
    """Grammars over one vocabulary. `check` belongs to an event loop, `open` and what it gives to
    one thread."""

    def __init__(
        self, tokenizer_json: Path, end_token_ids: Sequence[int], *, computes_masks: bool = True
    ) -> None:
        """Without `computes_masks` a grammar's process ends with its verdict."""
        self._fork_server = GrammarForkServer(tokenizer_json, end_token_ids)
        self._computes_masks = computes_masks
        self._lock = threading.Lock()
        self._verdicts = _Verdicts()
        self._processes: OrderedDict[Grammar, GrammarProcess] = OrderedDict()
        self._checks: dict[Grammar, asyncio.Task[None]] = {}
        self._first = _Lane(FIRST_CPU_S, Turns(MAX_AT_ONCE, MAX_WAITING))
        self._last = _Lane(LAST_CPU_S, Turns(MAX_SLOW_AT_ONCE, MAX_SLOW_WAITING))
        self._allowances = Allowances(PER_CORE_S * num_cores())
        self._keys = itertools.count(1)

    async def check(self, grammar: Grammar, client: str = "") -> None:
        """Compile it elsewhere, so that `open` finds it ready. `client` is who brings it, where
        clients are told apart.

        Raises:
            InvalidRequestError: naming the field and the limit, if it is no grammar, is not
                supported, or takes too long.
            CapacityError: too many others wait to be compiled, its turn has not come in time, or
                its client brings too many.
            UnavailableError: no process for it could be started.
        """
        with self._lock:
            if self._verdicts.find(grammar) and (
                not self._computes_masks or self._is_kept(grammar)
            ):
                return
        check_shape(grammar)
        if (task := self._checks.get(grammar)) is None:
            task = self._checks[grammar] = asyncio.create_task(self._check(grammar, client))
            task.add_done_callback(lambda ended: self._checked(grammar, ended))
        await asyncio.shield(task)  # others may wait for the same
        with self._lock:
            self._is_kept(grammar)

    def open(self, grammar: Grammar) -> GuidedText:
        """A text that has not begun. Its process is one that `check` made ready, or a new one,
        which is not `is_ready` before it has compiled."""
        with self._lock:
            process = self._processes.get(grammar)
            if process is None:
                process = self._keep(
                    grammar, GrammarProcess(self._fork_server, grammar, LAST_CPU_S, stays=True)
                )
            process.expected = process.expected[1:]
            self._processes.move_to_end(grammar)
            return GuidedText(process, next(self._keys))

    def close(self) -> None:
        """End all processes; what still waits for them fails."""
        with self._lock:
            processes = list(self._processes.values())
            self._processes.clear()
        self._fork_server.close()
        for process in processes:
            process.close()

    async def _check(self, grammar: Grammar, client: str) -> None:
        await self._allowances.take(client)
        try:
            try:
                process = await self._compile(grammar, self._first, client)
            except TooSlow:
                process = await self._compile(grammar, self._last, client)
        except InvalidRequestError as error:
            with self._lock:
                self._verdicts.remember(grammar, error.violations[0].description)
            raise
        with self._lock:
            self._verdicts.remember(grammar)
            if self._computes_masks:
                self._keep(grammar, process)

    async def _compile(self, grammar: Grammar, lane: _Lane, client: str) -> GrammarProcess:
        async with lane.turns.taken(client):
            process = GrammarProcess(
                self._fork_server, grammar, lane.cpu_limit_s, stays=self._computes_masks
            )
            try:
                await asyncio.wrap_future(process.compiled)
            except BaseException:
                process.close()
                raise
            return process

    def _checked(self, grammar: Grammar, ended: "asyncio.Task[None]") -> None:
        del self._checks[grammar]
        if not ended.cancelled():
            ended.exception()  # the waiters have it

    def _is_kept(self, grammar: Grammar) -> bool:
        """Whether there is a process, which is kept for one more request then. Under the lock."""
        process = self._processes.get(grammar)
        if process is None:
            return False
        process.expected = (*process.expected, time.monotonic() + EXPECTED_S)
        return True

    def _keep(self, grammar: Grammar, process: GrammarProcess) -> GrammarProcess:
        """Under the lock. Beyond the limits those end that are not used, and those that are
        expected to be last, the ones not used for longest first."""
        if (other := self._processes.pop(grammar, None)) is not None:
            other.close()
        self._processes[grammar] = process
        idle, expected, now_s = list[Grammar](), list[Grammar](), time.monotonic()
        for known, held in self._processes.items():
            held.expected = tuple(until_s for until_s in held.expected if until_s > now_s)
            if held.num_texts == 0 and held is not process:
                (expected if held.expected else idle).append(known)
        self._end(idle[: max(0, len(self._processes) - MAX_PROCESSES)])
        self._end(expected[: max(0, len(expected) - MAX_EXPECTED)])
        return process

    def _end(self, grammars: Iterable[Grammar]) -> None:
        for grammar in grammars:
            self._processes.pop(grammar).close()


def load_grammars(
    model_dir: Path, eos_token_ids: Sequence[int], *, computes_masks: bool = True
) -> Grammars | None:
    """For the vocabulary of the model's tokenizer; None where structured output cannot be offered:
    without a tokenizer, or without end-of-sequence tokens in its vocabulary, with which a text
    could end."""
    path = find_tokenizer(model_dir)
    if path is None or not eos_token_ids:
        return None
    try:
        LLTokenizer(str(path), eos_token=list(eos_token_ids))
    except ValueError as error:
        logger.warning(
            "structured output is not offered, %s does not serve for it: %s",
            path,
            shown(str(error)),
        )
        return None
    return Grammars(path, eos_token_ids, computes_masks=computes_masks)
