"""The results of launched steps, collected from the ranks that sample."""

import secrets
import time
from collections import deque
from dataclasses import dataclass, field

from engine.core.draft_trees import Verified
from engine.core.request import SampledToken
from engine.pipeline import records
from engine.pipeline.channel import PacketKind, StageChannel
from engine.pipeline.ranks import StageRanks
from engine.pipeline.records import StageResult
from engine.pipeline.step_plan import RankBatches
from engine.sampling.sampler import Scores
from runtime.errors import BatonError, IntegrityError, InternalError


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
    tokens: list[SampledToken]
    error: BatonError | None = None
    verified: list[Verified] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)


StepResults = tuple[StepResult | None, ...]  # by data rank; None if it had no batch in the step


class ResultCollector:
    """The results of launched steps, received from the sampling rank of each data rank."""

    def __init__(self, ranks: StageRanks, channel: StageChannel | None, *, last_stage: int) -> None:
        own = ranks.own
        self._sampling_ranks = [
            last_stage * own.size + data_rank * own.attention.size
            for data_rank in range(own.data_size)
        ]
        self._channel = channel
        self._due: deque[tuple[int, RankBatches]] = deque()  # steps by sequence number
        self._came: dict[int, StepResult] = {}  # results of the oldest step, by data rank

    def launched(self, sequence: int, step: RankBatches) -> None:
        self._due.append((sequence, step))

    def of_this_process(self, result: StepResult) -> None:
        """Store the first data rank's result of the only step in flight."""
        self._came[0] = result

    def collect(self, timeout_s: float) -> StepResults | None:
        """Implement `Pipeline.collect`."""
        if not self._due:
            return None
        deadline_s = time.monotonic() + timeout_s  # a float, as every step has one
        (sequence, step) = self._due[0]
        for data_rank, batch in enumerate(step):
            while batch is not None and data_rank not in self._came:
                result = self._receive(
                    self._sampling_ranks[data_rank],
                    sequence,
                    max(0.0, deadline_s - time.monotonic()),
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
            return step_result(sequence, records.unpack_result(packet))
        return None


def first_sequence() -> int:
    """Return a secret number to count a pipeline's batches from.

    It differs from those of other formings.
    """
    return secrets.randbits(63)


def step_result(sequence: int, result: StageResult) -> StepResult:
    return StepResult(sequence, result.tokens, verified=result.verified, scores=result.scores)
