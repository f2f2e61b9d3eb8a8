"""Grammar processes on their owner's side: calls, deadlines and termination.

Each process has a thread that exchanges messages with it, so that masks are requested before a
forward and collected after it. A process that does not respond in time is killed. The text of that
job fails; other texts continue in a new process, which replays their known tokens.
"""

import queue
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.errors import (
    BatonError,
    CapacityError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from runtime.grammar.children import FORK_S, GrammarChild, GrammarForkServer
from runtime.grammar.language import Grammar
from runtime.grammar.messages import (
    CHUNK_TOKENS,
    AnswerKind,
    Call,
    CompileOrder,
    TextAnswer,
    TextCall,
    pack_call,
    pack_order,
    path_to,
    unpack_answer,
    unpack_tokens,
)

Masks = dict[tuple[int, ...], bytes]  # a bit per token, keyed by the tokens after the text's end

# Tolerance of the CPU time limit: the kernel counts in whole ticks, so it may end a process a few
# ticks early.
TICKS_S = 0.02
COMPILE_WALL_S = 5.0  # deadline on a machine so busy that CPU time is no measure
MEMORY_BYTES = 128 << 20  # limit of one grammar, in addition to the tokenizer
ANSWER_S = 1.0  # for one mask; the library's limits end it after a hundredth of that
# A late process that used less CPU time was starved: limits end a mask after less.
STARVED_CPU_S = 0.1
# CPU time budget of one text: its maximum, what a step adds to it, and what a step adds to all
# texts together at most.
BURST_CPU_S = 0.2
TOKEN_CPU_S = 0.005
STEP_CPU_S = 0.04
# added per token if many tokens arrive at once, for a text that began elsewhere
REPLAYED_TOKEN_CPU_S = 0.0001
MAX_JOBS = 65536
_OF_NODES = (AnswerKind.MASK, AnswerKind.FORCED)


class TooSlow(InvalidRequestError):
    """Compilation needs more than the given CPU time."""


@dataclass
class MaskJob:
    """Pending computation of the masks of one text and of the nodes of a tree after it."""

    call: TextCall
    masks: Masks = field(default_factory=dict)
    # the only tokens that may follow, by the tokens before them as in `masks`
    forced: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    problem: str = ""
    is_stalled: bool = False  # the problem is that the machine starved its process
    cpu_s: float = 0.0
    process_cpu_s: float | None = None  # CPU time of the process when it received this job
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, deadline_s: float) -> bool:
        """Wait until `deadline_s` of `time.monotonic`; return whether the job is done."""
        return self.done.wait(max(0.0, deadline_s - time.monotonic()))

    def fail(self, problem: str, *, is_stalled: bool = False) -> None:
        if not self.problem:
            self.is_stalled = is_stalled
            self.problem = problem
        self.done.set()

    def add(self, answer: TextAnswer) -> None:
        """Add the mask of a node, or the tokens that are forced after it."""
        path = tuple(path_to(answer.node, self.call.tree_token_ids, self.call.tree_parents))
        if answer.answer is AnswerKind.MASK:
            self.masks.setdefault(path, answer.data)
        else:
            self.forced.setdefault(path, unpack_tokens(answer.data))


def unpacked(mask: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """Return the tokens that may come next, [vocab_size] bool.

    Tokens beyond the tokenizer's vocabulary are not allowed.
    """
    allowed = np.zeros(vocab_size, np.bool_)
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size]
    allowed[: len(bits)] = bits
    return allowed


class GrammarProcess:
    """One grammar, compiled in its own process, and the texts that follow it."""

    def __init__(
        self, fork_server: GrammarForkServer, grammar: Grammar, cpu_limit_s: float, *, stays: bool
    ) -> None:
        """Start to compile. Unless `stays` is set, the process ends after its verdict."""
        self._fork_server = fork_server
        self._grammar = grammar
        self._cpu_limit_s = cpu_limit_s
        self._stays = stays
        self._jobs: queue.Queue[MaskJob | TextCall | None] = queue.Queue(MAX_JOBS)
        self._child: GrammarChild | None = None
        self._known: dict[int, list[int]] = {}  # token ids by text key
        self._begun: set[int] = set()  # keys of texts that the current process has
        self._is_compiled = False  # state of the current process
        self.num_texts = 0  # number of open texts
        # Expiry of each expected request for this grammar; belongs to the owner.
        self.expected: tuple[float, ...] = ()
        self.compiled: Future[None] = Future()
        self.compiled.set_running_or_notify_cancel()  # prevents a waiter from cancelling it
        self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Return whether masks can be computed. Thread-safe."""
        return self._is_compiled

    def submit(self, job: MaskJob | TextCall) -> None:
        self._jobs.put_nowait(job)

    def give_up(self, job: MaskJob, limit: str) -> None:
        """Fail a job that missed its limit. Thread-safe.

        The error blames the grammar only if its process had CPU time: a process that was starved,
        or that never got to the job, is the machine's problem.
        """
        child = self._child
        before_s = job.process_cpu_s
        computed_s = 0.0 if child is None or before_s is None else child.cpu_s() - before_s
        if computed_s < STARVED_CPU_S:
            job.fail(
                f"the machine was too busy to compute the next token of a grammar within {limit}",
                is_stalled=True,
            )
        else:
            job.fail(f"its next token could not be computed within {limit}, the limit")

    def close(self) -> None:
        """End the process and its computation. Thread-safe."""
        self._stays = False
        child = self._child
        if child is not None:
            child.kill()
        self._jobs.put_nowait(None)

    def _run(self) -> None:
        try:
            self._compile()
        except BatonError as error:
            self._stays = False
            self.compiled.set_exception(error)
        except Exception as error:  # noqa: BLE001 (the edge of the thread: the waiter must get it)
            self._stays = False
            self.compiled.set_exception(
                InternalError(f"a grammar's process could not be used: {error!r}")
            )
        else:
            self.compiled.set_result(None)
        while self._stays and (job := self._jobs.get()) is not None:
            self._serve(job)
        if self._child is not None:
            self._child.close()
        while not self._jobs.empty():
            left = self._jobs.get_nowait()
            if isinstance(left, MaskJob):
                left.fail("the process of its grammar has ended", is_stalled=True)

    def _compile(self) -> None:
        child = self._child = self._fork_server.fork()
        began_s = time.monotonic()
        try:
            child.send(
                pack_order(CompileOrder(self._grammar, self._cpu_limit_s, MEMORY_BYTES)), FORK_S
            )
            verdict = unpack_answer(child.receive(COMPILE_WALL_S))
        except TimeoutError:
            raise CapacityError(
                f"the processor is too busy to compile a grammar within {COMPILE_WALL_S:g} s",
                resource="grammar compiler",
            ) from None
        except OSError:
            if time.monotonic() - began_s >= self._cpu_limit_s - TICKS_S:
                raise TooSlow(
                    FieldViolation(
                        self._grammar.field,
                        "could not be compiled within "
                        f"{self._cpu_limit_s:g} s of computing, the limit",
                    )
                ) from None
            raise self._grammar.refused(
                f"cannot be compiled: it needs more than {MEMORY_BYTES >> 20} MiB, or ends "
                "the compiler"
            ) from None
        finally:
            if not self._stays:
                child.close()
        if verdict.answer is AnswerKind.PROBLEM:
            raise self._grammar.refused(verdict.data.decode())
        self._is_compiled = True

    def _serve(self, job: MaskJob | TextCall) -> None:
        if isinstance(job, TextCall):  # the end of a text
            self._known.pop(job.key, None)
            if job.key in self._begun and self._child is not None:
                self._begun.discard(job.key)
                with suppress(OSError):
                    self._child.send(pack_call(job), ANSWER_S)
            return
        if job.done.is_set():
            return  # abandoned by its waiter
        try:
            if self._child is None:
                self._compile()
            self._answer(job)
        except BatonError as error:
            self._drop()
            job.fail(
                f"its grammar cannot be compiled again: {error}",
                is_stalled=isinstance(error, CapacityError | UnavailableError),
            )
        except TimeoutError:
            self.give_up(job, f"{ANSWER_S:g} s")
            self._drop()
        except (OSError, struct.error, ValueError):
            self._drop()
            job.fail(
                f"its next token needs more than {MEMORY_BYTES >> 20} MiB, the limit, or ended the computation"
            )

    def _answer(self, job: MaskJob) -> None:
        """Send a job and receive its masks. Raises OSError if the process has ended or hangs."""
        child = self._child
        call = job.call
        assert child is not None
        job.process_cpu_s = child.cpu_s()
        known = self._known.setdefault(call.key, [])
        del known[call.kept :]
        known += call.token_ids
        kept, tokens = (call.kept, call.token_ids) if call.key in self._begun else (0, known)
        self._begun.add(call.key)
        timeout_s = ANSWER_S
        while len(tokens) > CHUNK_TOKENS:
            child.send(
                pack_call(TextCall(Call.MOVE, call.key, kept, tokens[:CHUNK_TOKENS])), ANSWER_S
            )
            kept = kept + CHUNK_TOKENS
            tokens = tokens[CHUNK_TOKENS:]
            timeout_s += ANSWER_S
        child.send(
            pack_call(
                TextCall(
                    Call.ASK,
                    call.key,
                    kept,
                    tokens,
                    call.tree_token_ids,
                    call.tree_parents,
                    call.num_forced,
                )
            ),
            ANSWER_S,
        )
        while (answer := unpack_answer(child.receive(timeout_s))).answer in _OF_NODES:
            job.add(answer)
        job.cpu_s = answer.cpu_s
        if answer.answer is AnswerKind.PROBLEM:
            job.fail(answer.data.decode())
        job.done.set()

    def _drop(self) -> None:
        self._is_compiled = False
        if self._child is not None:
            self._child.close()
        self._child = None
        self._begun.clear()


class GuidedText:
    """One text that follows a grammar. Belongs to one thread."""

    def __init__(self, process: GrammarProcess, key: int) -> None:
        self._process = process
        self._key = key
        self._left_s = BURST_CPU_S  # remaining CPU time budget
        self._asked: MaskJob | None = None
        self._is_open = True
        process.num_texts += 1

    @property
    def is_ready(self) -> bool:
        """Return whether the grammar is compiled.

        Otherwise the next `ask` compiles it, which takes a second or fails.
        """
        return self._process.is_ready

    def ask(
        self,
        kept: int,
        token_ids: Sequence[int],
        tree_token_ids: Sequence[int] = (),
        tree_parents: Sequence[int] = (),
        *,
        share: float = 1.0,
        num_forced: int = 0,
    ) -> MaskJob:
        """Begin to compute the mask after the first `kept` tokens and `token_ids`.

        With a tree, whose node 0 is the last of them, masks of further nodes are computed as well
        while that is quick, and up to `num_forced` tokens after each leaf where the grammar leaves no
        choice. `share` is this text's part of all texts called in a step.

        A text that has used half of its budget gets no masks of further nodes and no such tokens: a
        draft's proposals must not end a text that plain decoding could continue.

        Raises:
            InvalidRequestError: the text has used more CPU time than its budget.
        """
        self._settle()
        if self._left_s < 0:
            raise InvalidRequestError(
                FieldViolation(
                    "structured_output",
                    f"its tokens take more computing than the limit of {BURST_CPU_S:g} s at once and "
                    f"{min(TOKEN_CPU_S, share * STEP_CPU_S) * 1e3:.3g} ms for each further one",
                )
            )
        self._left_s = min(BURST_CPU_S, self._left_s + min(TOKEN_CPU_S, share * STEP_CPU_S))
        self._left_s += REPLAYED_TOKEN_CPU_S * max(0, len(token_ids) - len(tree_parents) - 1)
        is_spare = self._left_s >= BURST_CPU_S / 2
        nodes = slice(None if is_spare else 1)
        job = MaskJob(
            TextCall(
                Call.ASK,
                self._key,
                kept,
                tuple(token_ids),
                tuple(tree_token_ids[nodes]),
                tuple(tree_parents[nodes]),
                num_forced if is_spare else 0,
            )
        )
        self._process.submit(job)
        self._asked = job
        return job

    def _settle(self) -> None:
        if self._asked is not None:
            self._left_s -= self._asked.cpu_s
            self._asked = None

    def give_up(self, job: MaskJob, limit: str) -> None:
        """Fail a job that was not done within `limit`."""
        self._process.give_up(job, limit)

    def close(self) -> None:
        """Close the text. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._process.num_texts -= 1
            self._process.submit(TextCall(Call.END, self._key))
