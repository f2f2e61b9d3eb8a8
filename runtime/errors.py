"""Every error Baton raises on purpose, and the one place that defines what each looks like to a
gRPC client.

BatonError
├── InvalidRequestError     the request is impossible                      INVALID_ARGUMENT
│   ├── UnknownModelError   a model this router does not serve             NOT_FOUND
│   └── UnsupportedError    a field or method that is not offered          UNIMPLEMENTED
├── DuplicateRequestError   request_id is running already                  ALREADY_EXISTS
├── UnauthenticatedError    no token, or a wrong one                       UNAUTHENTICATED
├── PermissionDeniedError   the caller's role may not do this              PERMISSION_DENIED
├── ConfigError             a flag, file or checkpoint cannot work         FAILED_PRECONDITION
├── IncompatiblePeerError   two workers that must not be paired            FAILED_PRECONDITION
├── CapacityError           a queue or pool is full                        RESOURCE_EXHAUSTED
├── UnavailableError        draining, or no worker that could serve        UNAVAILABLE
│   ├── DrainingError       leaves on purpose, hands its requests back     UNAVAILABLE
│   ├── StalledError         too late for one request, which moves         UNAVAILABLE
│   └── PeerLostError       a process died in the middle of a request      ABORTED
├── HandoffError            a transfer failed and no retry is left         ABORTED
│   └── IntegrityError      bytes arrived that are not the bytes sent      DATA_LOSS
├── DeadlineError           the request's time is up                       DEADLINE_EXCEEDED
├── RequestAborted          the client or its stream is gone               CANCELLED
└── InternalError           a bug: an invariant does not hold              INTERNAL
    └── StalePlanError      attention metadata planned for another batch
"""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that cannot be accepted, and the limit it breaks."""

    field: str
    description: str


class BatonError(Exception):
    """Root of the tree. `reason` is for programs (UPPER_SNAKE, becomes ErrorInfo.reason), the
    message for people."""

    reason = "INTERNAL"
    retry_after_s: float | None = None  # when trying again may help; None where nobody knows

    def again(self) -> Self:
        """The same error as an object of its own, to raise where others end with it, too: an object
        that several calls raise collects the frames of all of them, and a call that clears those
        clears the others'."""
        other = type(self).__new__(type(self), *self.args)
        vars(other).update(vars(self))
        return other


class InvalidRequestError(BatonError):
    """The request can never succeed as it is."""

    reason = "INVALID_REQUEST"

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served here; the message names the one that is."""

    reason = "UNKNOWN_MODEL"


class UnsupportedError(InvalidRequestError):
    """Another server of the same contract might do it; the violation names the field or method."""

    reason = "UNSUPPORTED"


class DuplicateRequestError(BatonError):
    """A request of this id is running."""

    reason = "DUPLICATE_REQUEST_ID"


class UnauthenticatedError(BatonError):
    """The caller has not shown who it is; the message never has what would have been right."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(BatonError):
    """The caller is known and may not do this."""

    reason = "PERMISSION_DENIED"


class ConfigError(BatonError):
    """A setting, a checkpoint or their combination cannot work; `field` names the setting."""

    reason = "BAD_CONFIG"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class IncompatiblePeerError(BatonError):
    """Prefill and decode differ in weights, geometry, dtype, page size or schema; the message shows
    both."""

    reason = "INCOMPATIBLE_PEER"


class CapacityError(BatonError):
    """Full now; trying later can work. `resource` names what is full (queue, pages, slots)."""

    reason = "OUT_OF_CAPACITY"

    def __init__(self, message: str, *, resource: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.resource = resource
        self.retry_after_s = retry_after_s


class UnavailableError(BatonError):
    """Nothing can serve it now. `retry_after_s`: seconds until something may; None where that is
    not known."""

    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(UnavailableError):
    """The process is leaving: what it refuses or hands back can go on elsewhere."""

    reason = "DRAINING"


class StalledError(UnavailableError):
    """A busy machine was late for one request, which may go on elsewhere; the process serves all
    others as before."""

    reason = "HELD_UP"


class PeerLostError(UnavailableError):
    """A worker or stage died while it held part of a request; the whole request may be sent
    again."""

    reason = "PEER_LOST"


class HandoffError(BatonError):
    """What a prompt left did not come from prefill to decode."""

    reason = "HANDOFF_FAILED"


class IntegrityError(HandoffError):
    """The digest of a transferred item does not match; the message names layer, kind and index."""

    reason = "DIGEST_MISMATCH"


class DeadlineError(BatonError):
    """Something did not end within its time, or could not."""

    reason = "DEADLINE_EXCEEDED"


class RequestAborted(BatonError):
    """The caller has ended the request, or reads none of it any more."""

    reason = "ABORTED_BY_CLIENT"


class InternalError(BatonError):
    """An invariant does not hold. Never the client's fault."""

    reason = "INTERNAL"


class StalePlanError(InternalError):
    """A forward was about to run on metadata planned for another batch, geometry or backend."""

    reason = "STALE_PLAN"
