"""Where one handoff stands on all stages of this pool, from the reports of each."""

from dataclasses import dataclass, field

from runtime.errors import BatonError, HandoffError, IntegrityError, PeerLostError
from transfer.terms import StageSessionEvent, StageSessionState

_ERRORS: dict[str, type[BatonError]] = {
    IntegrityError.reason: IntegrityError,
    PeerLostError.reason: PeerLostError,
}


@dataclass
class HandoffProgress:
    """One epoch of a session over `size` stages. Reports of other epochs are ignored."""

    size: int
    epoch: int
    num_bytes: int = 0
    error: BatonError | None = None  # the first stage's failure
    _reached: dict[StageSessionState, set[int]] = field(
        default_factory=lambda: {state: set() for state in StageSessionState})

    def on_report(self, rank: int, event: StageSessionEvent) -> None:
        if event.epoch != self.epoch or rank in self._reached[event.state]:
            return
        self._reached[event.state].add(rank)
        if event.state is StageSessionState.COMPLETE:
            self.num_bytes += event.num_bytes
        elif event.state is StageSessionState.FAILED and self.error is None:
            kind = _ERRORS.get(event.error_reason, HandoffError)
            self.error = kind(f"stage {rank}: {event.error_text}")

    @property
    def opened(self) -> bool:
        return self._all(StageSessionState.OPEN)

    @property
    def complete(self) -> bool:
        return self._all(StageSessionState.COMPLETE)

    @property
    def drained(self) -> bool:
        """No stage can read or write the request's memory for this session any more."""
        return self._all(StageSessionState.DRAINED)

    def _all(self, state: StageSessionState) -> bool:
        return len(self._reached[state]) == self.size
