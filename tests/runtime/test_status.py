import math
from base64 import b64encode
from collections.abc import Iterator
from typing import TypeVar
from urllib.parse import quote

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details_pb2
from google.rpc.status_pb2 import Status

from runtime import errors
from runtime.errors import BatonError, FieldViolation
from runtime.rpc.status import (
    DETAILS_KEY,
    MAX_RETRY_AFTER_S,
    PUSHBACK_KEY,
    RpcFailure,
    error_from_rpc,
    error_from_status,
    failure_of,
)

DetailT = TypeVar("DetailT", bound=Message)


def every_kind(root: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    for kind in root.__subclasses__():
        if kind.__module__ == "runtime.errors":
            yield kind
            yield from every_kind(kind)


EXPECTED = {
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
    errors.DrainingError: grpc.StatusCode.UNAVAILABLE,
    errors.StalledError: grpc.StatusCode.UNAVAILABLE,
    errors.PeerLostError: grpc.StatusCode.ABORTED,
    errors.HandoffError: grpc.StatusCode.ABORTED,
    errors.IntegrityError: grpc.StatusCode.DATA_LOSS,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RequestAborted: grpc.StatusCode.CANCELLED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
    errors.StalePlanError: grpc.StatusCode.INTERNAL,
}


def make(kind: type[BatonError]) -> BatonError:
    if issubclass(kind, errors.InvalidRequestError):
        return kind(
            FieldViolation("prompt", "is empty"),
            FieldViolation("stop.max_tokens", "at least 1, got 0"),
        )
    if kind is errors.CapacityError:
        return errors.CapacityError("no pages", resource="pages", retry_after_s=2.5)
    if kind is errors.ConfigError:
        return errors.ConfigError("no such folder", field="model")
    return kind("what happened")


def as_rpc_error(failure: RpcFailure) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        failure.code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata.from_tuple(failure.trailing_metadata),
        failure.message,
    )


def unpack(failure: RpcFailure, kind: type[DetailT]) -> list[DetailT]:
    raw = dict(failure.trailing_metadata)[DETAILS_KEY]
    assert isinstance(raw, bytes)
    status = Status.FromString(raw)
    found = []
    for packed in status.details:
        detail = kind()
        if packed.Unpack(detail):
            found.append(detail)
    return found


def test_every_error_of_the_tree_has_an_expected_code() -> None:
    assert set(every_kind()) == set(EXPECTED)


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_error_survives_the_wire(kind: type[BatonError]) -> None:
    error = make(kind)
    failure = failure_of(error, "r1")
    back = error_from_rpc(as_rpc_error(failure))
    assert failure.code is EXPECTED[kind]
    assert type(back) is kind
    if not isinstance(error, errors.InternalError):
        assert str(back) == str(error)
        assert back.retry_after_s == error.retry_after_s
        assert vars(back) == vars(error)
    info = unpack(failure, details_pb2.ErrorInfo)
    assert [(i.reason, i.domain) for i in info] == [(kind.reason, "baton")]


def test_invalid_request_names_each_field() -> None:
    (bad,) = unpack(failure_of(make(errors.InvalidRequestError)), details_pb2.BadRequest)
    assert [(v.field, v.description) for v in bad.field_violations] == [
        ("prompt", "is empty"),
        ("stop.max_tokens", "at least 1, got 0"),
    ]


def test_capacity_errors_carry_a_retry_delay() -> None:
    failure = failure_of(make(errors.CapacityError))
    (retry,) = unpack(failure, details_pb2.RetryInfo)
    (quota,) = unpack(failure, details_pb2.QuotaFailure)
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert quota.violations[0].subject == "pages"
    assert dict(failure.trailing_metadata)[PUSHBACK_KEY] == "2500"
    later = failure_of(errors.UnavailableError("draining", retry_after_s=0.5))
    assert dict(later.trailing_metadata)[PUSHBACK_KEY] == "500"
    assert PUSHBACK_KEY not in dict(
        failure_of(errors.UnavailableError("gone", retry_after_s=None)).trailing_metadata
    )


@pytest.mark.parametrize("estimated_s", [50.0, 3.9e5, math.inf])
def test_the_retry_delay_is_bounded_for_every_source(estimated_s: float) -> None:
    for error in (
        errors.CapacityError("full", resource="pages", retry_after_s=estimated_s),
        errors.UnavailableError("gone", retry_after_s=estimated_s),
    ):
        failure = failure_of(error)
        (retry,) = unpack(failure, details_pb2.RetryInfo)
        assert retry.retry_delay.ToMilliseconds() == MAX_RETRY_AFTER_S * 1e3 == 30_000
        assert dict(failure.trailing_metadata)[PUSHBACK_KEY] == "30000"


def test_config_error_is_a_failed_precondition() -> None:
    (broken,) = unpack(failure_of(make(errors.ConfigError)), details_pb2.PreconditionFailure)
    assert (broken.violations[0].type, broken.violations[0].subject) == ("BAD_CONFIG", "model")


@pytest.mark.parametrize(
    "error", [errors.StalePlanError("layer 3 secret"), ZeroDivisionError("layer 3 secret")]
)
def test_bugs_show_the_request_id_and_not_their_text(error: Exception) -> None:
    failure = failure_of(error, "r1")
    (info,) = unpack(failure, details_pb2.RequestInfo)
    assert info.request_id == "r1"
    assert "r1" in failure.message
    assert "secret" not in failure.message + repr(failure.trailing_metadata)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.CANCELLED, errors.RequestAborted),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ConfigError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.CapacityError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDeniedError),
        (grpc.StatusCode.UNAUTHENTICATED, errors.UnauthenticatedError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
    ],
)
def test_statuses_of_grpc_itself_become_typed_errors(
    code: grpc.StatusCode, kind: type[BatonError]
) -> None:
    assert type(error_from_rpc(as_rpc_error(RpcFailure(code, "text", ())))) is kind


@pytest.mark.parametrize("text", ["a" * 20_000, "\n" * 20_000, "🎐" * 5_000])
def test_a_status_fits_into_the_metadata_that_every_client_accepts(text: str) -> None:
    violations = [FieldViolation(f"sampling.logit_bias[{2**32 - i}]", text) for i in range(1, 2000)]
    for error in (
        errors.UnknownModelError(*violations),
        errors.CapacityError(text, resource="grammar compiler"),
        errors.ConfigError(text, field="model"),
        errors.IncompatiblePeerError(text),
        ZeroDivisionError(text),
    ):
        failure = failure_of(error, request_id=text)
        raw = dict(failure.trailing_metadata)[DETAILS_KEY]
        assert isinstance(raw, bytes)
        assert len(quote(failure.message)) + len(b64encode(raw)) < 8000  # and some for gRPC's own
        back = error_from_rpc(as_rpc_error(failure))
        assert type(back) is (
            errors.InternalError if isinstance(error, ZeroDivisionError) else type(error)
        )


def test_the_first_violations_and_the_number_of_others_are_reported() -> None:
    given = [FieldViolation(f"field[{i}]", "is bad") for i in range(16 + 104)]
    back = error_from_rpc(as_rpc_error(failure_of(errors.InvalidRequestError(*given))))
    assert isinstance(back, errors.InvalidRequestError)
    assert list(back.violations) == [
        *given[:16],
        FieldViolation("request", "and 104 more violations"),
    ]


def test_garbage_in_the_details_trailer_is_ignored() -> None:
    failure = RpcFailure(grpc.StatusCode.UNAVAILABLE, "text", ((DETAILS_KEY, b"\xff\xff\xff"),))
    assert type(error_from_rpc(as_rpc_error(failure))) is errors.UnavailableError


def test_a_detail_that_cannot_be_parsed_is_ignored() -> None:
    status = Status.FromString(
        failure_of(errors.CapacityError("full", resource="slots", retry_after_s=2.0)).status
    )
    info = next(detail for detail in status.details if detail.type_url.endswith("ErrorInfo"))
    info.value += b"\xff"
    back = error_from_status(status.SerializeToString())
    assert isinstance(back, errors.CapacityError), "by its code"
    assert (str(back), back.resource) == ("full", "calls")
