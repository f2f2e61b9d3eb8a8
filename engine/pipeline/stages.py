"""A pipeline of stages as the loop sees it, and what each process of it does.

    rank 0 (head)             rank 1..n-2                 rank n-1 (tail)
    launch: forward, send ─▶  receive, forward, send ─▶   receive, forward, sample ─┐
    collect ◀───────────────────────────────────────────────────────────────────────┘

Batches keep their order through every stage, so whatever a later batch reads an earlier one has written.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.batch import ForwardBatch, SamplingRow
from engine.pipeline import frames
from engine.pipeline.channel import StageChannel
from engine.pipeline.executor import StageExecutor
from engine.request import DrawnToken
from runtime.errors import BatonError, InternalError

Sampler = Callable[[Tensor, Sequence[SamplingRow]], list[DrawnToken]]


class StepFailed(InternalError):
    """A stage could not run this batch; the pipeline itself is fine."""

    reason = "STEP_FAILED"


@dataclass(frozen=True)
class StepResult:
    """What came back for one launched batch: a token per row that draws, in row order, or why there is none."""

    sequence: int
    tokens: list[DrawnToken]
    error: BatonError | None = None


class Pipeline(Protocol):
    """Batches go in at `launch` and come back, in order, from `collect`. Belongs to the engine thread."""

    @property
    def depth(self) -> int:
        """How many batches keep every stage busy."""
        ...

    def launch(self, batch: ForwardBatch) -> None: ...

    def collect(self, timeout_s: float) -> StepResult | None:
        """The oldest launched batch's result; None when it is not there in time or `wake` was called."""
        ...

    def wake(self) -> None: ...


def _draw(sampler: Sampler, logits: Tensor | None, batch: ForwardBatch) -> list[DrawnToken]:
    rows = [row for row in batch.sampling if row is not None]
    if not rows:
        return []
    if logits is None or logits.shape[0] != len(rows):
        raise InternalError(f"{len(rows)} rows draw a token, the model gave logits for "
                            f"{0 if logits is None else logits.shape[0]}")
    return sampler(logits, rows)


class SingleStage:
    """The whole model in this process."""

    depth = 1

    def __init__(self, executor: StageExecutor, sampler: Sampler) -> None:
        self._executor = executor
        self._sampler = sampler
        self._results: deque[StepResult] = deque()
        self._sequence = 0

    def launch(self, batch: ForwardBatch) -> None:
        self._sequence += 1
        try:
            tokens = _draw(self._sampler, self._executor.run(batch).logits, batch)
            self._results.append(StepResult(self._sequence, tokens))
        except (RuntimeError, ValueError, BatonError) as error:
            self._results.append(StepResult(self._sequence, [], StepFailed(f"stage 0: {error}")))

    def collect(self, timeout_s: float) -> StepResult | None:
        return self._results.popleft() if self._results else None

    def wake(self) -> None:
        """Nothing ever waits here."""


class HeadStage:
    """Rank 0 of a pool with more stages: runs its layers at launch, hears from the tail at collect."""

    def __init__(self, executor: StageExecutor, channel: StageChannel, *, size: int,
                 send_timeout_s: float = 10) -> None:
        self.depth = size
        self._executor = executor
        self._channel = channel
        self._send_timeout_s = send_timeout_s
        self._sequence = 0

    def launch(self, batch: ForwardBatch) -> None:
        self._sequence += 1
        frame = _run_to_frame(self._executor, self._sequence, batch, None, {}, rank=0)
        self._channel.send(1, frame, timeout_s=self._send_timeout_s)

    def collect(self, timeout_s: float) -> StepResult | None:
        raw = self._channel.receive(self.depth - 1, timeout_s=timeout_s)
        if raw is None:
            return None
        frame = frames.unpack(raw)
        if frame.kind is frames.FrameKind.ERROR:
            return StepResult(frame.sequence, [], StepFailed(frames.unpack_error(frame)))
        return StepResult(frame.sequence, frames.unpack_result(frame))

    def wake(self) -> None:
        self._channel.wake()


def _run_to_frame(executor: StageExecutor, sequence: int, batch: ForwardBatch, hidden: Tensor | None,
                  aux_hidden: dict[int, Tensor], *, rank: int) -> bytearray:
    """The frame for the next stage; a batch that cannot run becomes an error frame, so that stage 0 hears of it."""
    try:
        output = executor.run(batch, hidden, aux_hidden)
        return frames.pack_batch(sequence, batch, output.hidden, output.aux_hidden)
    except (RuntimeError, ValueError, BatonError) as error:
        return frames.pack_error(sequence, f"stage {rank}: {error}")


class FollowerStage:
    """Rank 1..n-1: receive, run, pass on. Keeps nothing between batches but its pools."""

    def __init__(self, executor: StageExecutor, sampler: Sampler, channel: StageChannel, *, rank: int, size: int,
                 on_step: Callable[[float, ForwardBatch], None] = lambda seconds, batch: None,
                 send_timeout_s: float = 10) -> None:
        self._on_step = on_step
        self._executor = executor
        self._sampler = sampler
        self._channel = channel
        self._rank = rank
        self._next = (rank + 1) % size
        self._is_last = rank == size - 1
        self._send_timeout_s = send_timeout_s

    def step(self, timeout_s: float) -> bool:
        """Serve at most one frame; False when none came in time. Raises PeerLostError when the pool is broken."""
        raw = self._channel.receive(self._rank - 1, timeout_s=timeout_s)
        if raw is None:
            return False
        frame = frames.unpack(raw)
        if frame.kind is frames.FrameKind.ERROR:
            reply = bytearray(raw)
        else:
            began = time.monotonic()
            stage_input = frames.unpack_batch(frame)
            reply = self._last(frame.sequence, stage_input) if self._is_last else _run_to_frame(
                self._executor, frame.sequence, stage_input.batch, stage_input.hidden, stage_input.aux_hidden,
                rank=self._rank)
            self._on_step(time.monotonic() - began, stage_input.batch)
        self._channel.send(self._next, reply, timeout_s=self._send_timeout_s)
        return True

    def _last(self, sequence: int, stage_input: frames.StageInput) -> bytearray:
        batch = stage_input.batch
        try:
            output = self._executor.run(batch, stage_input.hidden, stage_input.aux_hidden)
            return frames.pack_result(sequence, _draw(self._sampler, output.logits, batch))
        except (RuntimeError, ValueError, BatonError) as error:
            return frames.pack_error(sequence, f"stage {self._rank}: {error}")
