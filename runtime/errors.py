"""Every error that Baton raises on purpose, and its mapping to a gRPC status.

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
│   ├── DrainingError       the process drains and returns its requests    UNAVAILABLE
│   ├── StalledError        too late for one request, which moves          UNAVAILABLE
│   └── PeerLostError       a process died in the middle of a request      ABORTED
├── HandoffError            a transfer failed and no retry is left         ABORTED
│   └── IntegrityError      the received bytes differ from the sent ones   DATA_LOSS
├── DeadlineError           the request's deadline has passed              DEADLINE_EXCEEDED
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
    """Root of the error tree.

    `reason` is for programs (UPPER_SNAKE, sent as ErrorInfo.reason); the message is for people.
    """

    reason = "INTERNAL"
    retry_after_s: float | None = None  # delay after which a retry may succeed; None if unknown

    def again(self) -> Self:
        """Return a copy of the error, for calls that raise the same error independently.

        An object that several calls raise collects the frames of all of them. A call that clears
        its frames would clear those of the other calls.
        """
        other = type(self).__new__(type(self), *self.args)
        vars(other).update(vars(self))
        return other


class InvalidRequestError(BatonError):
    """The request can never succeed in this form."""

    reason = "INVALID_REQUEST"

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served here; the message names the one that is."""

    reason = "UNKNOWN_MODEL"


class UnsupportedError(InvalidRequestError):
    """The field or method that the violation names is not offered; another server may offer it."""

    reason = "UNSUPPORTED"


class DuplicateRequestError(BatonError):
    """A request with this id is running."""

    reason = "DUPLICATE_REQUEST_ID"


class UnauthenticatedError(BatonError):
    """The caller has not authenticated. The message never contains the expected credential."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(BatonError):
    """The caller is authenticated but not allowed to do this."""

    reason = "PERMISSION_DENIED"


class ConfigError(BatonError):
    """A setting, a checkpoint or their combination cannot work; `field` names the setting."""

    reason = "BAD_CONFIG"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class IncompatiblePeerError(BatonError):
    """Prefill and decode differ in weights, geometry, dtype, page size or schema.

    The message shows both sides.
    """

    reason = "INCOMPATIBLE_PEER"


class CapacityError(BatonError):
    """The resource is full now; a later attempt may succeed.

    `resource` names the full resource (queue, pages, slots).
    """

    reason = "OUT_OF_CAPACITY"

    def __init__(self, message: str, *, resource: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.resource = resource
        self.retry_after_s = retry_after_s


class UnavailableError(BatonError):
    """No process can serve the request now.

    `retry_after_s` is the number of seconds until one may; None if unknown.
    """

    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(UnavailableError):
    """The process is draining; the requests that it rejects or returns can continue elsewhere."""

    reason = "DRAINING"


class StalledError(UnavailableError):
    """A busy machine was too late for one request, which may continue on another one.

    The process serves all other requests as before.
    """

    reason = "HELD_UP"


class PeerLostError(UnavailableError):
    """A worker or stage died while it held part of a request; the whole request may be sent again."""

    reason = "PEER_LOST"


class HandoffError(BatonError):
    """The state of a prompt did not arrive from prefill at decode."""

    reason = "HANDOFF_FAILED"


class IntegrityError(HandoffError):
    """The digest of a transferred item does not match; the message names layer, kind and index."""

    reason = "DIGEST_MISMATCH"


class DeadlineError(BatonError):
    """An operation did not end before its deadline, or could not have."""

    reason = "DEADLINE_EXCEEDED"


class RequestAborted(BatonError):
    """The caller has cancelled the request or no longer reads its stream."""

    reason = "ABORTED_BY_CLIENT"


class InternalError(BatonError):
    """An invariant does not hold. This is never the client's fault."""

    reason = "INTERNAL"


class StalePlanError(InternalError):
    """A forward was about to run on metadata planned for another batch, geometry or backend."""

    reason = "STALE_PLAN"
