"""Errors on the wire: mapping of `BatonError` to a gRPC status with google.rpc details, and back.

    failure_of(error, request_id="") -> RpcFailure          for servers; runtime.rpc.server calls it for every handler
    error_from_rpc(rpc_error) -> BatonError                 for clients, sync and async
    failure.status, error_from_status(status)               the same for a status in a message, of one of several
                                                            requests on a call: a serialized google.rpc.Status

Details: ErrorInfo always (domain "baton"); BadRequest for InvalidRequestError; QuotaFailure for
CapacityError; PreconditionFailure for ConfigError and IncompatiblePeerError; RetryInfo if the retry
delay is known, at most `MAX_RETRY_AFTER_S`, because the delay is an estimate; RequestInfo for bugs,
whose text stays in the server's log. A status travels as metadata, of which clients accept 8 KiB
and proxies rarely more; beyond that they replace it by an error of their own. So texts are
truncated.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2 as details_pb2
from google.rpc.status_pb2 import Status

from runtime import errors
from runtime.errors import BatonError

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
# The message is sent twice, once percent-encoded (up to three times as long), and violations in
# base64.
MAX_MESSAGE_BYTES = 1024
MAX_ID_BYTES = 128
MAX_VIOLATIONS = 16
MAX_VIOLATIONS_BYTES = 1536
MAX_RETRY_AFTER_S = 30.0

_CODES: Mapping[type[BatonError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownModelError: grpc.StatusCode.NOT_FOUND,
    errors.UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    errors.DuplicateRequestError: grpc.StatusCode.ALREADY_EXISTS,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.IncompatiblePeerError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.PeerLostError: grpc.StatusCode.ABORTED,
    errors.HandoffError: grpc.StatusCode.ABORTED,
    errors.IntegrityError: grpc.StatusCode.DATA_LOSS,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RequestAborted: grpc.StatusCode.CANCELLED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
    BatonError: grpc.StatusCode.INTERNAL,
}


@dataclass(frozen=True)
class RpcFailure:
    """Arguments of `context.abort` for a failed call."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]

    @property
    def status(self) -> bytes:
        """Return the serialized google.rpc.Status."""
        return _status_in(self.trailing_metadata)


class EndedCall(Protocol):
    """Common interface of gRPC's sync and async errors."""

    def code(self) -> grpc.StatusCode | None: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def code_of(error: BatonError) -> grpc.StatusCode:
    """Return the status code of the nearest ancestor in the table."""
    return next(_CODES[ancestor] for ancestor in type(error).__mro__ if ancestor in _CODES)


def failure_of(error: Exception, request_id: str = "") -> RpcFailure:
    """Return the status that a client sees.

    Bugs and foreign exceptions show the request id instead of their text.
    """
    if not isinstance(error, BatonError) or isinstance(error, errors.InternalError):
        request_id = _cut(request_id, MAX_ID_BYTES)
        reason = error.reason if isinstance(error, BatonError) else BatonError.reason
        message = f"internal error, see the server's log for request {request_id or '(no id)'}"
        info = details_pb2.RequestInfo(request_id=request_id)
        return _failure(grpc.StatusCode.INTERNAL, message, [_error_info(reason, {}), info])
    if isinstance(error, errors.InvalidRequestError):
        error = type(error)(*_shown(error.violations))
    code = code_of(error)
    message = _cut(str(error), MAX_MESSAGE_BYTES)
    details: list[Message] = [_error_info(error.reason, _facts(error)), *_specific(error, message)]
    trailers: list[tuple[str, str | bytes]] = []
    if error.retry_after_s is not None:
        delay = Duration()
        retry_after_s = min(max(error.retry_after_s, 0.0), MAX_RETRY_AFTER_S)
        delay.FromNanoseconds(round(retry_after_s * 1e9))
        details.append(details_pb2.RetryInfo(retry_delay=delay))
        trailers.append((PUSHBACK_KEY, str(delay.ToMilliseconds())))
    return _failure(code, message, details, trailers)


def _shown(violations: Sequence[errors.FieldViolation]) -> Sequence[errors.FieldViolation]:
    """Return the first violations, and the number of the remaining ones."""
    shown = violations[:MAX_VIOLATIONS]
    shown = [
        errors.FieldViolation(v.field, _cut(v.description, MAX_VIOLATIONS_BYTES // len(shown)))
        for v in shown
    ]
    if (more := len(violations) - len(shown)) > 0:
        shown.append(errors.FieldViolation("request", f"and {more} more violations"))
    return shown


def _cut(text: str, limit: int) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= limit else encoded[:limit].decode(errors="ignore") + "..."


def _error_info(reason: str, facts: Mapping[str, str]) -> details_pb2.ErrorInfo:
    return details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=facts)


def _facts(error: BatonError) -> dict[str, str]:
    """Return the fields of a typed error, so that the client can rebuild it."""
    if isinstance(error, errors.CapacityError):
        return {"resource": error.resource}
    if isinstance(error, errors.ConfigError):
        return {"field": error.field}
    return {}


def _specific(error: BatonError, message: str) -> list[Message]:
    if isinstance(error, errors.InvalidRequestError):
        violations = [
            details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
            for v in error.violations
        ]
        return [details_pb2.BadRequest(field_violations=violations)]
    if isinstance(error, errors.CapacityError):
        quota = details_pb2.QuotaFailure.Violation(subject=error.resource, description=message)
        return [details_pb2.QuotaFailure(violations=[quota])]
    if isinstance(error, errors.ConfigError | errors.IncompatiblePeerError):
        subject = error.field if isinstance(error, errors.ConfigError) else ""
        broken = details_pb2.PreconditionFailure.Violation(
            type=error.reason, subject=subject, description=message
        )
        return [details_pb2.PreconditionFailure(violations=[broken])]
    return []


def _failure(
    code: grpc.StatusCode,
    message: str,
    details: list[Message],
    trailers: Iterable[tuple[str, str | bytes]] = (),
) -> RpcFailure:
    packed = []
    for detail in details:
        packed.append(AnyMessage())
        packed[-1].Pack(detail)
    number: int = code.value[0]
    status = Status(code=number, message=message, details=packed)
    return RpcFailure(code, message, (*trailers, (DETAILS_KEY, status.SerializeToString())))


@dataclass(frozen=True)
class _Details:
    """Decoded details of a status, the reverse of `_failure`."""

    reason: str
    facts: Mapping[str, str]
    violations: tuple[errors.FieldViolation, ...]
    retry_after_s: float | None


_Builder = Callable[[str, _Details], BatonError]


def _named(kind: Callable[[str], BatonError]) -> _Builder:
    return lambda message, _: kind(message)


def _invalid(kind: type[errors.InvalidRequestError]) -> _Builder:
    return lambda message, details: kind(
        *(details.violations or (errors.FieldViolation("request", message),))
    )


_BY_REASON: Mapping[str, _Builder] = {
    errors.InvalidRequestError.reason: _invalid(errors.InvalidRequestError),
    errors.UnknownModelError.reason: _invalid(errors.UnknownModelError),
    errors.UnsupportedError.reason: _invalid(errors.UnsupportedError),
    errors.DuplicateRequestError.reason: _named(errors.DuplicateRequestError),
    errors.UnauthenticatedError.reason: _named(errors.UnauthenticatedError),
    errors.PermissionDeniedError.reason: _named(errors.PermissionDeniedError),
    errors.ConfigError.reason: lambda m, d: errors.ConfigError(m, field=d.facts.get("field", "")),
    errors.IncompatiblePeerError.reason: _named(errors.IncompatiblePeerError),
    errors.CapacityError.reason: lambda m, d: errors.CapacityError(
        m, resource=d.facts.get("resource", "unknown"), retry_after_s=d.retry_after_s
    ),
    errors.DrainingError.reason: lambda m, d: errors.DrainingError(
        m, retry_after_s=d.retry_after_s
    ),
    errors.StalledError.reason: lambda m, d: errors.StalledError(m, retry_after_s=d.retry_after_s),
    errors.UnavailableError.reason: lambda m, d: errors.UnavailableError(
        m, retry_after_s=d.retry_after_s
    ),
    errors.PeerLostError.reason: lambda m, d: errors.PeerLostError(
        m, retry_after_s=d.retry_after_s
    ),
    errors.HandoffError.reason: _named(errors.HandoffError),
    errors.IntegrityError.reason: _named(errors.IntegrityError),
    errors.DeadlineError.reason: _named(errors.DeadlineError),
    errors.RequestAborted.reason: _named(errors.RequestAborted),
    errors.StalePlanError.reason: _named(errors.StalePlanError),
    errors.InternalError.reason: _named(errors.InternalError),
}


def _exhausted(message: str) -> BatonError:
    """Return the error for a RESOURCE_EXHAUSTED without details.

    gRPC itself rejects a message over a limit of either end, naming both sizes. A proxy rejects a
    call beyond its limit.
    """
    if "larger than max" in message:
        return errors.InvalidRequestError(
            errors.FieldViolation("request", message.removeprefix("SERVER: "))
        )
    return errors.CapacityError(message, resource="calls")


# For statuses that gRPC itself produced, which carry no details and no retry delay.
_BY_CODE: Mapping[grpc.StatusCode, Callable[[str], BatonError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.CANCELLED: errors.RequestAborted,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.UNIMPLEMENTED: lambda m: errors.ConfigError(
        f"the server does not offer this call: {m}", field="target"
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: _exhausted,
    grpc.StatusCode.INVALID_ARGUMENT: lambda m: errors.InvalidRequestError(
        errors.FieldViolation("request", m)
    ),
}


# Codes that gRPC itself reports when a process dies during a call. It also reports INTERNAL when a
# message is sent to a stream that the peer has just ended; the peer's status is lost then.
_TRANSPORT_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
    }
)


def is_lost(call: EndedCall) -> bool:
    """Return whether the peer died before the call ended, or cannot be reached."""
    answered = any(key == DETAILS_KEY for key, _ in call.trailing_metadata() or ())
    return call.code() in _TRANSPORT_CODES and not answered


def error_from_rpc(call: EndedCall) -> BatonError:
    """Return the typed error of a failed call, with the server's violations and retry delay."""
    code = call.code() or grpc.StatusCode.UNKNOWN
    return _error_of(
        code, call.details() or "", _parsed(_status_in(call.trailing_metadata() or ()))
    )


def error_from_status(status: bytes) -> BatonError | None:
    """Return the typed error of a status in a message, or None if the status is OK."""
    parsed = _parsed(status)
    code = _CODE_OF_NUMBER.get(parsed.code, grpc.StatusCode.UNKNOWN)
    return None if code is grpc.StatusCode.OK else _error_of(code, parsed.message, parsed)


_CODE_OF_NUMBER: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _error_of(code: grpc.StatusCode, message: str, status: Status) -> BatonError:
    message = message or "no details"
    details = _read_details(status)
    if details.reason in _BY_REASON:
        return _BY_REASON[details.reason](message, details)
    if code in _BY_CODE:
        return _BY_CODE[code](message)
    return errors.InternalError(f"{code.name}: {message}")


def _status_in(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    raw = next((value for key, value in metadata if key == DETAILS_KEY), b"")
    return raw if isinstance(raw, bytes) else raw.encode()


def _parsed(raw: bytes) -> Status:
    status = Status()
    with suppress(DecodeError):  # a status of another server: only its code counts
        status.ParseFromString(raw)
    return status


def _read_details(status: Status) -> _Details:
    info = details_pb2.ErrorInfo()
    bad = details_pb2.BadRequest()
    retry = details_pb2.RetryInfo()
    for packed in status.details:
        for detail in (info, bad, retry):
            try:
                packed.Unpack(detail)
            except DecodeError:  # a detail of another server, as in `_parsed`
                detail.Clear()
    return _Details(
        reason=info.reason if info.domain == DOMAIN else "",
        facts=dict(info.metadata),
        violations=tuple(
            errors.FieldViolation(v.field, v.description) for v in bad.field_violations
        ),
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9
        if retry.HasField("retry_delay")
        else None,
    )
