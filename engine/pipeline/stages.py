"""A pipeline of stages, as the loop drives it, and the work of each of its processes.

`StageExecutor` runs one stage's layers on a batch, independent of other stages. The other classes
connect it to them.

    rank 0 (head)             rank 1..n-2                 rank n-1 (tail)
    launch: forward, send ─▶  receive, forward, send ─▶   receive, forward, sample ─┐
    collect ◀───────────────────────────────────────────────────────────────────────┘

Batches keep their order through every stage, so a later batch can read all that an earlier one has
written.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from engine.contracts.attention import AttentionBackend
from engine.contracts.latent import LatentAttentionBackend
from engine.contracts.model import ForwardContext, StageModel, StageOutput
from engine.contracts.recurrent import RecurrentBackend
from engine.core.batch import ForwardBatch, ForwardMode, plan_where_needed
from engine.core.draft_trees import NO_TREE, SpecInfo, Verified
from engine.core.numerics import HOST, use_in_this_thread
from engine.core.request import DrawnToken
from engine.core.time_limits import FrameLimit
from engine.graphs.runner import Replays
from engine.pipeline import records
from engine.pipeline.channel import Packet, PacketKind, StageChannel
from engine.pipeline.overlap import Overlap
from engine.pipeline.ranks import BROKEN_POOL, StageRanks, Step
from engine.pipeline.records import StageInput, StageResult
from engine.sampling.sampler import RequestSampler, Scores, score
from engine.speculative.contracts.drafter import Drafter
from engine.speculative.contracts.verify import draw_runs
from runtime.errors import BatonError, ConfigError, IntegrityError, InternalError

LayerObserver = Callable[[ForwardBatch, int], None]


class Commits(Protocol):
    """A cache that holds entries of verified nodes and must move the accepted ones into place."""

    def commit(self, batch: ForwardBatch) -> None:
        """Move the entries that the rows accepted in their previous step (`SpecRow.accepted`)."""
        ...


class StageExecutor:
    """One stage's model with its backends.

    `on_layer_done(batch, layer_id)` is called for each layer as it completes. `caches` commit the
    nodes that earlier verifications accepted, before a batch runs. `graphs` run the batches that
    they have a bucket for.
    """

    def __init__(
        self,
        *,
        model: StageModel,
        attention: AttentionBackend | None,
        recurrent: RecurrentBackend,
        latent_attention: LatentAttentionBackend | None = None,
        caches: Sequence[Commits] = (),
        on_layer_done: LayerObserver | None = None,
        device: torch.device = HOST,
        graphs: Replays | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        """Create an executor with exactly one of `attention` and `latent_attention`.

        It must be the kind that the model's layers have. `overlap` runs batches in two halves, or
        is None.

        Raises:
            ConfigError: the model has no attention layer.
            InternalError: `graphs` and the executor have different observers.
        """
        planner = attention if attention is not None else latent_attention
        if planner is None:
            raise ConfigError("a model without any attention layer is not supported", field="model")
        if graphs is not None and graphs.observer is not on_layer_done:
            raise InternalError(
                "the layer observer differs from the one that captured forwards call"
            )
        self.model = model
        self._graphs = graphs
        self._caches = caches
        self._planner = planner
        self._attention = attention
        self._latent_attention = latent_attention
        self._recurrent = recurrent
        self._on_layer_done = on_layer_done
        self._device = device
        self._overlap = overlap
        self.num_plans = 0
        self.num_forwards = {"graph": 0, "eager": 0, "halves": 0, "idle": 0}

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, incoming: StageOutput | None = None) -> StageOutput:
        """Return the hidden states for the next stage, or the last stage's logits of sampling rows.

        `incoming` is the output of the previous stage, or None on the first. The prompts of a
        PREBUILT batch were computed elsewhere. PREBUILT and idle batches only take part in the
        forwards of other data ranks, and return an empty output.
        """
        if batch.mode in (ForwardMode.PREBUILT, ForwardMode.IDLE):
            idle = batch.inner_idle if batch.mode is ForwardMode.PREBUILT else batch
            if idle is not None:
                self.num_forwards["idle"] += 1
                self.model.forward(
                    idle,
                    None,
                    ForwardContext(self._attention, self._recurrent, None, self._latent_attention),
                )
            return StageOutput()
        if self._device != HOST:
            use_in_this_thread(self._device)
        for cache in self._caches:
            cache.commit(batch)
        given = (incoming or StageOutput()).to(self._device)
        bucket = None if self._graphs is None else self._graphs.bucket_for(batch)
        if self._graphs is not None and bucket is not None:
            self.num_forwards["graph"] += 1
            if self._graphs.plans_share_memory:
                self.num_plans += 1
            else:
                self.num_plans += plan_where_needed(batch, self._planner)
            return self._graphs.run(batch, bucket, given)
        observer = self._on_layer_done
        done = None if observer is None else lambda layer_id: observer(batch, layer_id)
        middle = None if self._overlap is None else self._overlap.middle(batch)
        self.num_forwards["eager" if middle is None else "halves"] += 1
        if self._overlap is None or middle is None:
            return self._forward(batch, given, done)
        first, second = batch.split(middle)
        given_first, given_second = given.split(first.num_tokens)
        # In every layer, the second half is the later one.
        return self._overlap.run(
            lambda: self._forward(first, given_first, None),
            lambda: self._forward(second, given_second, done),
        )

    @torch.inference_mode()
    def plan_ahead(self, batch: ForwardBatch) -> None:
        """Plan and mark a batch while another one may run, unless plans share memory.

        Device plans are in buffers that the running batch reads. For those, `run` plans after it.
        """
        shares = self._device != HOST or (
            self._graphs is not None and self._graphs.plans_share_memory
        )
        if not shares and batch.mode not in (ForwardMode.PREBUILT, ForwardMode.IDLE):
            self.num_plans += plan_where_needed(batch, self._planner)

    @torch.inference_mode()
    def _forward(
        self, batch: ForwardBatch, given: StageOutput, done: Callable[[int], None] | None
    ) -> StageOutput:
        self.num_plans += plan_where_needed(batch, self._planner)
        context = ForwardContext(self._attention, self._recurrent, done, self._latent_attention)
        return self.model.forward(
            batch, given.hidden, context, given.aux_hidden, given.selected_keys
        )


logger = logging.getLogger(__name__)


class StepFailed(InternalError):
    """A stage could not run this batch. The pipeline itself still works."""

    reason = "STEP_FAILED"


@dataclass(frozen=True)
class StepResult:
    """The result of one launched batch: a token per sampling row, in row order, or an error.

    `scores` has one entry per scoring row, in row order. On a pool that speculates, `verified` has
    one entry per sampling row, and the row has as many tokens as its accepted nodes. For a PREBUILT
    batch, `verified` has one entry per row.
    """

    sequence: int
    tokens: list[DrawnToken]
    error: BatonError | None = None
    verified: list[Verified] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)


StepResults = tuple[StepResult | None, ...]  # by data rank; None if it had no batch in the step


class Pipeline(Protocol):
    """A pipeline: `launch` takes steps, and `collect` returns their results in order.

    The engine thread owns it.
    """

    @property
    def depth(self) -> int:
        """Return the number of steps that keeps every stage busy."""
        ...

    @property
    def runs_apart(self) -> bool:
        """Return whether `launch` only queues steps, which another thread computes one by one."""
        ...

    def launch(self, step: Step) -> None: ...

    def collect(self, timeout_s: float) -> StepResults | None:
        """Return the results of the oldest launched step.

        Return None on timeout, or if `wake` was called.
        """
        ...

    def wake(self) -> None: ...


@dataclass(frozen=True)
class LastStage:
    """The work of the last stage on its logits: sample tokens, and draft the next trees.

    Without a drafter, a speculating pool verifies root tokens only, which is plain decoding.
    """

    sampler: RequestSampler
    drafter: Drafter | None = None

    def finish(self, batch: ForwardBatch, output: StageOutput) -> StageResult:
        """Return the result of a batch.

        Each row of a PREBUILT batch gets a first tree and samples nothing. An idle batch has no
        rows.
        """
        if batch.mode is ForwardMode.IDLE:
            return StageResult([], [], [])
        if batch.mode is ForwardMode.PREBUILT:
            first = (
                self.drafter.begin(batch)
                if self.drafter is not None
                else [NO_TREE] * batch.num_rows
            )
            return StageResult([], [Verified((), tree) for tree in first], [])
        scored = score(output.logits, batch)
        runs = draw_runs(scored.drawing, batch, self.sampler)
        tokens = [token for run in runs for token in run.tokens]
        if not isinstance(batch.spec_info, SpecInfo):
            return StageResult(tokens, [], scored.scores)
        trees = (
            self.drafter.propose(batch, output, runs)
            if self.drafter is not None
            else [NO_TREE] * len(runs)
        )
        verified = [
            Verified(tuple(run.accepted), tree) for run, tree in zip(runs, trees, strict=True)
        ]
        return StageResult(tokens, verified, scored.scores)


class _Results:
    """The results of launched steps, received from the sampling rank of each data rank."""

    def __init__(self, ranks: StageRanks, channel: StageChannel | None, *, last_stage: int) -> None:
        own = ranks.own
        self._drawing = [
            last_stage * own.size + data_rank * own.attention.size
            for data_rank in range(own.data_size)
        ]
        self._channel = channel
        self._due: deque[tuple[int, Step]] = deque()  # steps by sequence number
        self._came: dict[int, StepResult] = {}  # results of the oldest step, by data rank

    def launched(self, sequence: int, step: Step) -> None:
        self._due.append((sequence, step))

    def of_this_process(self, result: StepResult) -> None:
        """Store the first data rank's result of the only step in flight."""
        self._came[0] = result

    def collect(self, timeout_s: float) -> StepResults | None:
        """Implement `Pipeline.collect`."""
        if not self._due:
            return None
        deadline_s = time.monotonic() + timeout_s
        (sequence, step) = self._due[0]
        for data_rank, batch in enumerate(step):
            while batch is not None and data_rank not in self._came:
                result = self._receive(
                    self._drawing[data_rank], sequence, max(0.0, deadline_s - time.monotonic())
                )
                if result is None:
                    return None
                self._came[data_rank] = result
        self._due.popleft()
        results = tuple(self._came.get(data_rank) for data_rank in range(len(step)))
        self._came.clear()
        return results

    def _receive(self, rank: int, sequence: int, timeout_s: float) -> StepResult | None:
        assert self._channel is not None, "only other processes' results are received"
        while (packet := self._channel.receive(rank, timeout_s=timeout_s)) is not None:
            if packet.kind in (PacketKind.PART, PacketKind.FAULT):
                continue  # from a batch that failed on this rank
            if packet.sequence != sequence:
                raise IntegrityError(
                    f"from stage {rank}: the result of batch {packet.sequence}, but that of batch "
                    f"{sequence} is due"
                )
            if packet.kind is PacketKind.ERROR:
                return StepResult(sequence, [], StepFailed(records.unpack_error(packet)))
            return _step_result(sequence, records.unpack_result(packet))
        return None


def first_sequence() -> int:
    """Return a secret number to count a pipeline's batches from.

    It differs from those of other formings.
    """
    return secrets.randbits(63)


class SingleStage:
    """The whole model in this process, which is the first of the stage's `ranks`."""

    depth = 1
    runs_apart = False

    def __init__(
        self,
        executor: StageExecutor,
        sampler: RequestSampler,
        drafter: Drafter | None = None,
        ranks: StageRanks | None = None,
        channel: StageChannel | None = None,
    ) -> None:
        """Create the stage. `channel` leads to the other ranks, if there are any."""
        self._executor = executor
        self._ranks = ranks or StageRanks()
        self._last = LastStage(sampler, drafter)
        self._channel = channel
        self._results = _Results(self._ranks, channel, last_stage=0)
        self._sequence = first_sequence()

    def launch(self, step: Step) -> None:
        self._sequence += 1
        self._ranks.lead(self._sequence, step)
        self._results.launched(self._sequence, step)
        if step[0] is not None:
            self._results.of_this_process(self._run(step[0]))

    def _run(self, batch: ForwardBatch) -> StepResult:
        try:
            with self._ranks.step(self._sequence):
                self._last.sampler.prepare(batch)
                result = self._last.finish(batch, self._executor.run(batch))
            return _step_result(self._sequence, result)
        except BROKEN_POOL:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this batch and not the pipeline
            return StepResult(self._sequence, [], StepFailed(_failure(0, error)))

    def collect(self, timeout_s: float) -> StepResults | None:
        return self._results.collect(timeout_s)

    def wake(self) -> None:
        if self._channel is not None:
            self._channel.wake()


class HeadStage:
    """Rank 0 of a pool with several stages.

    It runs its layers in `launch`, and receives the last stage's results in `collect`.
    """

    runs_apart = False

    def __init__(
        self,
        executor: StageExecutor,
        channel: StageChannel,
        *,
        size: int,
        frame_timeout_s: float = 10,
        ranks: StageRanks | None = None,
    ) -> None:
        """Create the first of `size` stages, each with as many ranks as this one.

        The next stage takes a frame within `frame_timeout_s`, or longer if steps are long
        (`FrameLimit`).
        """
        self.depth = size
        self._ranks = ranks or StageRanks()
        self._executor = executor
        self._channel = channel
        self._frame_limit = FrameLimit(frame_timeout_s)
        self._results = _Results(self._ranks, channel, last_stage=size - 1)
        self._launched_s: deque[float] = deque()
        self._sequence = first_sequence()

    def launch(self, step: Step) -> None:
        self._sequence += 1
        self._launched_s.append(time.monotonic())
        self._ranks.lead(self._sequence, step)
        self._results.launched(self._sequence, step)
        if step[0] is not None:
            packet = _run_to_packet(
                self._executor, self._ranks, self._sequence, step[0], None, stage=0
            )
            self._channel.send(self._ranks.own.size, packet, timeout_s=self._frame_limit.seconds)

    def collect(self, timeout_s: float) -> StepResults | None:
        results = self._results.collect(timeout_s)
        if results is not None:
            self._frame_limit.measured(time.monotonic() - self._launched_s.popleft())
        return results

    def wake(self) -> None:
        self._channel.wake()


def _step_result(sequence: int, result: StageResult) -> StepResult:
    return StepResult(sequence, result.tokens, verified=result.verified, scores=result.scores)


def _run_to_packet(
    executor: StageExecutor,
    ranks: StageRanks,
    sequence: int,
    batch: ForwardBatch,
    incoming: StageOutput | None,
    *,
    stage: int,
) -> Packet:
    """Run a batch and return the packet for the next stage.

    If the batch cannot run, return an error packet, which is forwarded to stage 0.
    """
    try:
        with ranks.step(sequence):
            return records.pack_batch(sequence, batch, executor.run(batch, incoming))
    except BROKEN_POOL:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends this batch and not the pipeline
        return records.pack_error(sequence, _failure(stage, error))


def _failure(stage: int, error: Exception) -> str:
    """Log the error of a batch, and return its text for the requests of that batch."""
    logger.error("stage %d could not run a batch", stage, exc_info=error)
    return f"stage {stage}: {error}"


class FollowerStage:
    """A process 1..n-1 of a pool, which receives, runs and forwards batches.

    Between batches it keeps only its pools. The first rank of each data rank in the last stage
    samples, so it also keeps its sampler's and drafter's state of requests.
    """

    def __init__(
        self,
        executor: StageExecutor,
        sampler: RequestSampler,
        channel: StageChannel,
        *,
        rank: int,
        size: int,
        drafter: Drafter | None = None,
        on_step: Callable[[float, ForwardBatch], None] = lambda seconds, batch: None,
        frame_timeout_s: float = 10,
        ranks: StageRanks | None = None,
    ) -> None:
        """Create process `rank` of `size` processes, numbered stage by stage.

        `ranks` are those of its stage. `sampler` and `drafter` are used only if this process
        samples. `frame_timeout_s` is as in `HeadStage`.
        """
        self._on_step = on_step
        self._executor = executor
        self._last_stage = LastStage(sampler, drafter)
        self._channel = channel
        self._ranks = ranks or StageRanks()
        num_ranks = self._ranks.own.size
        self._stage = rank // num_ranks
        # the leader, or the same rank of the previous stage
        self._before = max(0, rank - num_ranks)
        self._draws = rank >= size - num_ranks and self._ranks.own.attention.rank == 0
        self._next = 0 if self._draws else rank + num_ranks if rank + num_ranks < size else None
        self._frame_limit = FrameLimit(frame_timeout_s)

    def step(self, timeout_s: float) -> bool:
        """Serve at most one packet, and return whether one came in time.

        Raises:
            PeerLostError: a stage is lost.
            IntegrityError: a packet was damaged, which breaks the pool.
        """
        packet = self._channel.receive(self._before, timeout_s=timeout_s)
        if packet is None:
            return False
        if packet.kind in (PacketKind.PART, PacketKind.FAULT):
            return True  # from a batch that failed on this rank
        if packet.kind is PacketKind.ERROR:
            reply = replace(packet, record=bytes(packet.record))
        else:
            began = time.monotonic()
            stage_input = records.unpack_batch(packet)
            reply = (
                self._last(packet.sequence, stage_input)
                if self._draws
                else _run_to_packet(
                    self._executor,
                    self._ranks,
                    packet.sequence,
                    stage_input.batch,
                    stage_input.incoming,
                    stage=self._stage,
                )
            )
            took_s = time.monotonic() - began
            self._frame_limit.measured(took_s)
            self._on_step(took_s, stage_input.batch)
        if self._next is not None:
            self._channel.send(self._next, reply, timeout_s=self._frame_limit.seconds)
        return True

    def _last(self, sequence: int, stage_input: StageInput) -> Packet:
        batch = stage_input.batch
        try:
            with self._ranks.step(sequence):
                self._last_stage.sampler.prepare(batch)
                output = self._executor.run(batch, stage_input.incoming)
                result = self._last_stage.finish(batch, output)
                return records.pack_result(sequence, result.tokens, result.verified, result.scores)
        except BROKEN_POOL:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this batch and not the pipeline
            return records.pack_error(sequence, _failure(self._stage, error))
