"""Sessions and hints of requests, in the workers' terms."""

import json

import pytest

from protos import generation_pb2 as pb
from protos import types_pb2
from router.request.cache_hints import (
    MAX_HINTS,
    RETENTION_S,
    CacheHints,
    HintAction,
    HintOutcome,
    cache_session,
    hint_violations,
    outcomes,
    session_named,
)
from runtime.session_limits import DIGEST_BYTES

APPLIED, UNKNOWN, INVALID = HintOutcome.APPLIED, HintOutcome.UNKNOWN, HintOutcome.INVALID


def hints(*actions: tuple[str, object], version: str = "0.1", action: str = "0.1") -> pb.KvHints:
    return pb.KvHints(
        protocol_version=version,
        actions=[
            pb.KvHintAction(
                action_type=name,
                action_version=action,
                payload=payload if isinstance(payload, str) else json.dumps(payload),
            )
            for name, payload in actions
        ],
    )


def session_of(name: str, *, client: str = "c", salt: str = "", request_id: str = "r") -> bytes:
    session = cache_session(name, CacheHints(), client=client, salt=salt, request_id=request_id)
    assert session is not None
    return session.digest


@pytest.mark.parametrize(
    ("given", "retention_s", "ends", "outcome"),
    [
        (hints(("kv.retain", {"ttl_seconds": 60})), 60.0, False, APPLIED),
        (hints(("kv.retain", {"ttl_seconds": 60.5, "priority": 3})), 60.5, False, APPLIED),
        (hints(("kv.retain", {"ttl_seconds": 60, "priority": 0})), 0.0, False, APPLIED),
        (hints(("kv.retain", "")), RETENTION_S, False, APPLIED),
        (hints(("kv.evict", "")), None, True, APPLIED),
        (hints(("kv.evict", {}), version="1.7", action="1"), None, True, APPLIED),
        (hints(("kv.retain", {"ttl_seconds": 3601})), None, False, INVALID),
        (hints(("kv.retain", {"ttl_seconds": -1})), None, False, INVALID),
        (hints(("kv.retain", '{"ttl_seconds": NaN}')), None, False, INVALID),
        (hints(("kv.retain", {"ttl_seconds": "60"})), None, False, INVALID),
        (hints(("kv.retain", {"priority": True})), None, False, INVALID),
        (hints(("kv.retain", {"directives": []})), None, False, INVALID),
        (hints(("kv.retain", "[" * 4000)), None, False, INVALID),
        (hints(("kv.evict", {"block_hashes": [1]})), None, False, INVALID),
        (hints(("kv.fetch", {})), None, False, UNKNOWN),
        (hints(("other", {})), None, False, UNKNOWN),
        (hints(("kv.evict", {}), version="2.0"), None, False, UNKNOWN),
        (hints(("kv.evict", {}), version=""), None, False, UNKNOWN),
        (hints(("kv.evict", {}), action="2.0"), None, False, UNKNOWN),
    ],
)
def test_a_hint_is_applied_or_ignored(
    given: pb.KvHints, retention_s: float | None, *, ends: bool, outcome: HintOutcome
) -> None:
    asked, found = outcomes(given)
    assert asked == CacheHints(retention_s, ends)
    name = given.actions[0].action_type
    known = HintAction(name) if name in ("kv.retain", "kv.evict") else HintAction.OTHER
    assert found == [(known, outcome)]


def test_an_invalid_hint_does_not_undo_the_others() -> None:
    asked, found = outcomes(hints(("kv.evict", {}), ("kv.retain", {"no": 1}), ("kv.retain", {})))
    assert asked == CacheHints(RETENTION_S, ends_session=True)
    assert [outcome for _, outcome in found] == [APPLIED, INVALID, APPLIED]


def test_sessions_of_different_clients_salts_and_names_are_different() -> None:
    assert session_of("s") == session_of("s", request_id="another")
    others = [
        session_of("t"),
        session_of("s", client="d"),
        session_of("s", salt="x"),
        session_of("cs", client=""),
    ]
    assert len({session_of("s"), *others}) == 5
    assert len(session_of("s")) == DIGEST_BYTES


def test_a_retained_request_without_a_session_is_one_of_its_own() -> None:
    def session(hint: CacheHints, request_id: str) -> types_pb2.CacheSession | None:
        return cache_session("", hint, client="c", salt="", request_id=request_id)

    assert session(CacheHints(), "r") is None
    assert session(CacheHints(0.0), "r") is None
    assert session(CacheHints(ends_session=True), "r") is None
    first, second = session(CacheHints(60.0), "r"), session(CacheHints(60.0), "q")
    assert first is not None
    assert second is not None
    assert first.digest != second.digest != session_of("r")
    assert first.client == second.client


@pytest.mark.parametrize(
    ("named", "metadata", "session"),
    [
        ("", {}, ""),
        ("own", {"session-id": "other"}, "own"),
        ("", {"session-id": "a", "x-session-affinity": "b"}, "a"),
        ("", {"x-session-affinity": "b", "x-claude-code-session-id": "c"}, "b"),
        ("", {"x-claude-code-session-id": "c"}, "c"),
        ("", {"baton-session-id": "z", "session-id": "a"}, "z"),
    ],
)
def test_the_session_is_the_requests_or_else_that_of_its_metadata(
    named: str, metadata: dict[str, str | bytes], session: str
) -> None:
    assert session_named(pb.GenerateRequest(session_id=named), metadata) == session


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (pb.KvHints(message_id="m" * 129), ["kv_hints.message_id"]),
        (pb.KvHints(actions=[pb.KvHintAction()] * (MAX_HINTS + 1)), ["kv_hints.actions"]),
        (
            pb.KvHints(
                actions=[
                    pb.KvHintAction(action_id="i"),
                    pb.KvHintAction(
                        action_id="i" * 129,
                        action_type="t" * 129,
                        action_version="v" * 129,
                        payload="p" * 4097,
                    ),
                ]
            ),
            [
                f"kv_hints.actions[1].{field}"
                for field in ("action_id", "action_type", "action_version", "payload")
            ],
        ),
        (hints(("t" * 128, "p" * 4096)), []),
    ],
)
def test_sizes_are_limited(given: pb.KvHints, fields: list[str]) -> None:
    assert [violation.field for violation in hint_violations(given)] == fields
