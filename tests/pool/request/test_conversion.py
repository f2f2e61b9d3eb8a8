"""Requests that a worker refuses, from any sender."""

import math
from typing import Any

import pytest

from engine.core.request import CacheSession, ClientShare, Request
from pool.request.conversion import MAX_LISTED_TOKENS, request_from_proto
from protos import types_pb2
from runtime.errors import InvalidRequestError

VOCAB_SIZE, CONTEXT = 512, 256


@pytest.mark.parametrize(
    ("field", "change", "count", "limit"),
    [
        ("prompt_token_ids", {"prompt_token_ids": [VOCAB_SIZE] * 100_000}, 100_000, CONTEXT),
        (
            "stop_token_ids",
            {"stop_token_ids": [VOCAB_SIZE] * (MAX_LISTED_TOKENS + 1)},
            MAX_LISTED_TOKENS + 1,
            MAX_LISTED_TOKENS,
        ),
        (
            "sampling.logit_bias",
            {"sampling": types_pb2.SamplingParams(logit_bias=dict.fromkeys(range(2000), 1.0))},
            2000,
            MAX_LISTED_TOKENS,
        ),
    ],
)
def test_lists_are_measured_before_they_are_looked_through(
    field: str, change: dict[str, Any], count: int, limit: int
) -> None:
    given: dict[str, Any] = {"prompt_token_ids": [1, 2], "max_tokens": 1, **change}
    with pytest.raises(InvalidRequestError) as caught:
        request_from_proto(
            types_pb2.EngineRequest(**given), vocab_size=VOCAB_SIZE, max_context_tokens=CONTEXT
        )
    found = [
        violation.description for violation in caught.value.violations if violation.field == field
    ]
    assert f"has {count} entries, the limit is {limit}" in found
    assert not any("vocabulary" in description for description in found)


def test_a_field_of_a_newer_router_is_refused() -> None:
    request = types_pb2.EngineRequest(prompt_token_ids=[1, 2], max_tokens=1)
    request.MergeFromString(b"\x98\x3e\x01")
    with pytest.raises(InvalidRequestError, match="field 995: is unknown to this version"):
        request_from_proto(request, vocab_size=VOCAB_SIZE, max_context_tokens=CONTEXT)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"client": b"short"}, "share.client"),
        ({"weight": 0.0}, "share.weight"),
        ({"weight": 1001.0}, "share.weight"),
        ({"weight": math.nan}, "share.weight"),
    ],
)
def test_a_share_outside_its_limits_is_refused(change: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"client": b"c" * 16, "weight": 4.0}

    def read(**share: Any) -> Request:  # noqa: ANN401 - fields of a message
        message = types_pb2.EngineRequest(
            prompt_token_ids=[1, 2], max_tokens=1, share=types_pb2.ClientShare(**share)
        )
        return request_from_proto(message, vocab_size=VOCAB_SIZE, max_context_tokens=CONTEXT)

    assert read(**given).share == ClientShare(b"c" * 16, 4.0)
    with pytest.raises(InvalidRequestError) as caught:
        read(**{**given, **change})
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"digest": b"short"}, "session.digest"),
        ({"client": b"c" * 17}, "session.client"),
        ({"retention_s": -1.0}, "session.retention_s"),
        ({"retention_s": 3601.0}, "session.retention_s"),
        ({"retention_s": math.nan}, "session.retention_s"),
    ],
)
def test_a_session_outside_its_limits_is_refused(change: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"digest": b"d" * 16, "client": b"c" * 16, "retention_s": 9.0}

    def read(session: dict[str, Any]) -> Request:
        message = types_pb2.EngineRequest(
            prompt_token_ids=[1, 2], max_tokens=1, session=types_pb2.CacheSession(**session)
        )
        return request_from_proto(message, vocab_size=VOCAB_SIZE, max_context_tokens=CONTEXT)

    assert read(given).session == CacheSession(b"d" * 16, b"c" * 16, 9.0)
    with pytest.raises(InvalidRequestError) as caught:
        read({**given, **change})
    assert [violation.field for violation in caught.value.violations] == [field]
