"""Measurements of a decode pool's steps, and the longest rest of a prompt that fits into one.

Belongs to the engine thread.
"""

from dataclasses import dataclass, field
from functools import cached_property

from decode.draft_costs import DraftCosts
from decode.entry import DECODING, DecodeEntry, DecodeLimits
from decode.speculation import VerifiedListener, VerifiedStep
from engine.core.batch import ForwardBatch, ForwardMode
from engine.pipeline.results import StepResult
from engine.speculative.contracts.config import Proposer
from pool.request.entry import EntryTable
from runtime.clock import Clock

REST_SHARE = 0.1  # largest fraction by which prefilling in a step may lengthen it
PACE_MEMORY = 0.9
# seconds after which a slow rate is forgotten, so that prefilling is tried again
PACE_MEMORY_S = 30.0


@dataclass
class StepMeter:
    """The duration of steps, from one result to the next."""

    limits: DecodeLimits
    clock: Clock
    entries: EntryTable[DecodeEntry]
    costs: DraftCosts = field(default_factory=DraftCosts)
    _since_s: float = 0.0  # time of the last result, or of the first launch after a pause

    @cached_property
    def rests(self) -> "RestLimit":
        return RestLimit(self.limits.local_rest_tokens, self.clock)

    def begin(self) -> None:
        """Note that a step is launched after a pause."""
        self._since_s = self.clock.now()

    def measure(
        self,
        batch: ForwardBatch,
        result: StepResult,
        num_running: int,
        on_verified: VerifiedListener,
    ) -> None:
        """Record how long the batch took, and report what it verified."""
        if self.limits.speculates and batch.mode in DECODING and result.error is None:
            seconds = self.clock.now() - self._since_s
            step = VerifiedStep.of(batch, result, self._proposer_of, seconds)
            self.costs.observe(step, num_running)
            on_verified(step, num_running)
        self._note_pace(batch, num_running)
        self._since_s = self.clock.now()

    def _proposer_of(self, key: int) -> Proposer | None:
        """Return what drafted for the request's last step; None if it may have no drafts."""
        entry = self.entries[key]
        return entry.draft.proposer if entry.may_draft else None

    def _note_pace(self, batch: ForwardBatch, num_running: int) -> None:
        """Record the duration of steps, and of prefill tokens while there are streams."""
        seconds = self.clock.now() - self._since_s
        if batch.mode in DECODING:
            self.rests.stepped(seconds)
        elif batch.mode is ForwardMode.PREFILL:
            num_streams = sum(
                sampling is not None and bool(self.entries[key].outputs)
                for key, sampling in zip(batch.request_keys, batch.sampling, strict=True)
            )
            if num_streams or num_running > batch.num_rows:
                self.rests.read(batch.num_tokens - num_streams, seconds, is_step=num_streams > 0)


@dataclass
class RestLimit:
    """The longest rest of a prompt that a pool prefills in a step of its streams.

    It is at most `most` tokens. By recent measurements, it lengthens the step by at most the
    fraction `REST_SHARE`. Belongs to the engine thread.
    """

    most: int
    clock: Clock
    _step_s: float = 0.0  # seconds of a step of streams only; 0.0: not measured
    _token_s: float = 0.0  # seconds per prefilled token; 0.0: not measured
    _seen_s: float = 0.0

    def stepped(self, seconds: float) -> None:
        """Record the duration of a step of streams."""
        self._step_s = _blend(self._step_s, seconds)

    def read(self, num_tokens: int, seconds: float, *, is_step: bool) -> None:
        """Record `num_tokens` prefilled in a step of streams, or while streams waited."""
        own_s = max(seconds - self._step_s, 0.0) if is_step else seconds
        self._token_s, self._seen_s = _blend(self._token_s, own_s / num_tokens), self.clock.now()

    def tokens(self, *, has_streams: bool) -> int:
        """Return the current limit."""
        is_known = self._token_s > 0 and self.clock.now() < self._seen_s + PACE_MEMORY_S
        if not has_streams or not is_known:
            return self.most
        return min(self.most, int(REST_SHARE * self._step_s / self._token_s))


def _blend(before: float, seen: float) -> float:
    return PACE_MEMORY * before + (1 - PACE_MEMORY) * seen if before else seen
