"""Acceptance checks of grammars, and the processes that compute the masks of accepted ones.

A new grammar is compiled with a short time limit first. If that fails, it is compiled with a longer
one, for which only a few grammars may queue. So a flood of slow grammars costs each fast one a
tenth of a second, not its turn. Both rejections and acceptances are cached.
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

# CPU time for a grammar of usual size, and for the slowest that is accepted.
FIRST_CPU_S = 0.1
LAST_CPU_S = 1.0
MAX_AT_ONCE = 4
MAX_WAITING = 32
MAX_SLOW_AT_ONCE = 2
MAX_SLOW_WAITING = 8
MAX_REMEMBERED = 4096  # verdicts
REMEMBER_S = 600.0  # lifetime of a rejection for its cost, which depends on the machine
# New grammars of a client per second and core. Each takes about 10 ms on routers and on workers.
PER_CORE_S = 4.0
MAX_PROCESSES = 64  # limit of idle processes
# Processes kept for requests whose grammars were checked, and for how long.
MAX_EXPECTED = 128
EXPECTED_S = 30.0


@dataclass(frozen=True)
class _CompilationQueue:
    """Queue of compilations with one time limit. Belongs to an event loop."""

    cpu_limit_s: float
    turns: Turns


@dataclass
class _Verdicts:
    """Cached verdicts on the most recent grammars. Guarded by the owner's lock."""

    # By digest: the reason of the rejection ("" if accepted), and its expiry.
    known: OrderedDict[bytes, tuple[str, float]] = field(default_factory=OrderedDict)

    def find(self, grammar: Grammar) -> bool:
        """Return whether the grammar was accepted. Raises InvalidRequestError if it was rejected."""
        found = self.known.get(grammar.digest)
        if found is None:
            return False
        problem, expires_s = found
        if problem and time.monotonic() < expires_s:
            raise grammar.refused(problem)
        self.known.move_to_end(grammar.digest)
        return not problem

    def remember(self, grammar: Grammar, problem: str = "") -> None:
        self.known[grammar.digest] = problem, time.monotonic() + REMEMBER_S
        self.known.move_to_end(grammar.digest)
        while len(self.known) > MAX_REMEMBERED:
            self.known.popitem(last=False)


class Grammars:
    """Grammars over one vocabulary.

    `check` belongs to an event loop; `open` and the texts it returns belong to one thread.
    """

    def __init__(
        self, tokenizer_json: Path, end_token_ids: Sequence[int], *, computes_masks: bool = True
    ) -> None:
        """Create the checker. Without `computes_masks` a grammar's process ends after its verdict."""
        self._fork_server = GrammarForkServer(tokenizer_json, end_token_ids)
        self._computes_masks = computes_masks
        self._lock = threading.Lock()
        self._verdicts = _Verdicts()
        self._processes: OrderedDict[Grammar, GrammarProcess] = OrderedDict()
        self._checks: dict[tuple[Grammar, str], asyncio.Task[None]] = {}  # by grammar and client
        self._first = _CompilationQueue(FIRST_CPU_S, Turns(MAX_AT_ONCE, MAX_WAITING))
        self._last = _CompilationQueue(LAST_CPU_S, Turns(MAX_SLOW_AT_ONCE, MAX_SLOW_WAITING))
        self._allowances = Allowances(PER_CORE_S * num_cores())
        self._keys = itertools.count(1)

    async def check(self, grammar: Grammar, client: str = "") -> None:
        """Compile the grammar in another process, so that `open` finds it ready.

        `client` identifies the sender if clients are distinguished.

        Raises:
            InvalidRequestError: the grammar is invalid, unsupported or takes too long; names the field and
                the limit.
            CapacityError: too many grammars are queued, its turn did not come in time, or its client sends
                too many.
            UnavailableError: its process could not be started.
        """
        with self._lock:
            if self._verdicts.find(grammar) and (
                not self._computes_masks or self._is_kept(grammar)
            ):
                return
        check_shape(grammar)
        # A check is not shared between clients: it would also share the wait for a turn, and a
        # rejection because its client sends too many.
        key = grammar, client
        if (task := self._checks.get(key)) is None:
            task = self._checks[key] = asyncio.create_task(self._check(grammar, client))
            task.add_done_callback(lambda ended: self._checked(key, ended))
        await asyncio.shield(task)  # other requests may wait for the same check
        with self._lock:
            self._is_kept(grammar)

    def open(self, grammar: Grammar) -> GuidedText:
        """Return a text without tokens.

        Its process is the one that `check` made ready, or a new one, which is not `is_ready` before
        it has compiled the grammar.
        """
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
        """End all processes; pending jobs fail."""
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

    async def _compile(
        self, grammar: Grammar, lane: _CompilationQueue, client: str
    ) -> GrammarProcess:
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

    def _checked(self, key: tuple[Grammar, str], ended: "asyncio.Task[None]") -> None:
        del self._checks[key]
        if not ended.cancelled():
            ended.exception()  # the waiters raise it

    def _is_kept(self, grammar: Grammar) -> bool:
        """Return whether a process exists, and keep it for one more request. Needs the lock."""
        process = self._processes.get(grammar)
        if process is None:
            return False
        process.expected = (*process.expected, time.monotonic() + EXPECTED_S)
        return True

    def _keep(self, grammar: Grammar, process: GrammarProcess) -> GrammarProcess:
        """Store the process and end idle ones beyond the limits. Needs the lock.

        Ends processes that no request expects first, then expected ones; within each group the
        least recently used first.
        """
        other = self._processes.get(grammar)
        if other is not None and other.is_ready:  # texts may already follow it
            process.close()
            process = other
        elif other is not None:
            other.close()
        self._processes[grammar] = process
        self._processes.move_to_end(grammar)
        idle = list[Grammar]()
        expected = list[Grammar]()
        now_s = time.monotonic()
        for known, held in self._processes.items():
            held.expected = tuple(expires_s for expires_s in held.expected if expires_s > now_s)
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
    """Return the grammars of the model's vocabulary, or None without structured output.

    It needs a tokenizer, and end-of-sequence tokens in its vocabulary with which a text can end.
    """
    path = find_tokenizer(model_dir)
    if path is None or not eos_token_ids:
        return None
    try:
        LLTokenizer(str(path), eos_token=list(eos_token_ids))
    except ValueError as error:
        logger.warning(
            "structured output is not offered, %s cannot be used for it: %s",
            path,
            shown(str(error)),
        )
        return None
    return Grammars(path, eos_token_ids, computes_masks=computes_masks)
