"""Retry policy of a request whose worker failed: what may be retried, and how often."""

from dataclasses import dataclass
from enum import StrEnum

from runtime.errors import (
    BatonError,
    DeadlineError,
    DrainingError,
    InternalError,
    InvalidRequestError,
    StalledError,
    UnavailableError,
)


@dataclass(frozen=True)
class FlowLimits:
    """Timeouts of a request and limits on its attempts.

    With the default `peer_wait_s` a client waits less than five seconds for a token, if workers
    restart within that time.
    """

    prefill_attempts: int = 3
    peer_wait_s: float = 4.0  # until a lost worker is replaced or back
    capacity_wait_s: float = 60.0  # for capacity in a decode pool, after all refused
    reserve_s: float = 4.0  # from opening a decode stream to its destination terms
    commit_s: float = 30.0  # from the last byte sent to its commit
    migrations: int = 3  # decode pools that one request may lose


def may_retry(error: BatonError) -> bool:
    """Return whether another worker could help: not for an invalid request, a bug or a timeout."""
    return not isinstance(error, InvalidRequestError | InternalError | DeadlineError)


def is_suspect(error: BatonError) -> bool:
    """Return whether not to use a worker after this error until it reports again.

    A worker that was only late stays in use.
    """
    return isinstance(error, UnavailableError) and not isinstance(error, StalledError)


class MoveReason(StrEnum):
    """Reason why a pool gave a request up; a metric label."""

    LOST = "lost"
    DRAINED = "drained"
    STALLED = "held_up"  # the metric keeps its label
    PREEMPTED = "preempted"  # for a more urgent request


def move_reason(error: BatonError) -> MoveReason:
    """Return why a pool gave a request up, by the error of its stream."""
    if isinstance(error, DrainingError):
        return MoveReason.DRAINED
    return MoveReason.STALLED if isinstance(error, StalledError) else MoveReason.LOST
