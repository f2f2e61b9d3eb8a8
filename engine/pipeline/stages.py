"""A pipeline of stages, as the loop drives it, and the work of each of its processes.

`StageExecutor` (`engine.pipeline.stage_executor`) runs one stage's layers on a batch. The classes
of this module connect it to the other stages.

    rank 0 (head)             rank 1..n-2                 rank n-1 (tail)
    launch: forward, send ─▶  receive, forward, send ─▶   receive, forward, sample ─┐
    collect ◀───────────────────────────────────────────────────────────────────────┘

Batches keep their order through every stage, so a later batch can read all that an earlier one has
written.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import NO_TREE, SpecInfo, TokenTree, Verified
from engine.core.time_limits import FrameLimit
from engine.pipeline import records
from engine.pipeline.channel import Packet, PacketKind, StageChannel
from engine.pipeline.ranks import BROKEN_POOL, StageRanks
from engine.pipeline.records import StageInput, StageResult
from engine.pipeline.results import (
    ResultCollector,
    StepFailed,
    StepResult,
    StepResults,
    first_sequence,
    step_result,
)
from engine.pipeline.stage_executor import StageExecutor
from engine.pipeline.step_plan import RankBatches
from engine.sampling.sampler import RequestSampler, score
from engine.speculative.contracts.drafter import Drafter
from engine.speculative.contracts.verify import AcceptedRun, sample_runs

logger = logging.getLogger(__name__)


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

    def launch(self, step: RankBatches) -> None: ...

    def collect(self, timeout_s: float) -> StepResults | None:
        """Return the results of the oldest launched step.

        Return None on timeout, or if `wake` was called.
        """
        ...

    def wake(self) -> None: ...


@dataclass(frozen=True)
class LastStage:
    """The work of the last stage on its logits: sample tokens, and draft the next trees.

    Without a drafter, a speculating pool has drafts from stage 0, and those that grammars force.
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
        runs = sample_runs(scored.sampled, batch, self.sampler)
        tokens = [token for run in runs for token in run.tokens]
        if not isinstance(batch.spec_info, SpecInfo):
            return StageResult(tokens, [], scored.scores)
        trees = (
            self.drafter.propose(batch, output, runs)
            if self.drafter is not None
            else [NO_TREE] * len(runs)
        )
        verified = []
        for run, tree in zip(runs, trees, strict=True):
            forced = self._forced(batch, batch.spec_info, run)
            verified.append(Verified(tuple(run.accepted), forced or tree, is_forced=bool(forced)))
        return StageResult(tokens, verified, scored.scores)

    def _forced(self, batch: ForwardBatch, spec: SpecInfo, run: AcceptedRun) -> TokenTree:
        """Return the tokens that a row's grammar forces next: drafts that are never rejected."""
        sampling = batch.sampling[run.row]
        limit = spec.rows[run.row].num_draft_tokens
        if not limit or sampling is None or sampling.output is None:
            return NO_TREE
        chain = self.sampler.forced(sampling, [token.token_id for token in run.tokens])[:limit]
        return TokenTree.chain(chain)


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
        self._results = ResultCollector(self._ranks, channel, last_stage=0)
        self._sequence = first_sequence()

    def launch(self, step: RankBatches) -> None:
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
            return step_result(self._sequence, result)
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
        self._results = ResultCollector(self._ranks, channel, last_stage=size - 1)
        self._launched_s: deque[float] = deque()
        self._sequence = first_sequence()

    def launch(self, step: RankBatches) -> None:
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
