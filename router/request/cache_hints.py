"""The session of a request and its hints about caches, in the workers' terms.

Hints are those of the KV-hints envelope that several engines share. They are advice: a hint that is
unknown, or makes no sense, is ignored and counted. No response depends on a session or a hint.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protos import generation_pb2 as pb
from protos import types_pb2
from runtime.errors import FieldViolation
from runtime.session_limits import DIGEST_BYTES, MAX_RETENTION_S

RETENTION_S = 300.0  # of a session's newest point without a hint; chosen by bench.cache_policy
MAX_SESSION_ID_BYTES = 128
MAX_HINTS = 16
MAX_HINT_NAME_BYTES = 128
MAX_PAYLOAD_BYTES = 4096
MAJOR_VERSIONS = ("0", "1")
# Metadata that may name the session, the first one first: Baton's, and what agents and gateways use.
SESSION_KEYS = (
    "baton-session-id",
    "session-id",
    "x-session-id",
    "x-session-affinity",
    "x-claude-code-session-id",
)


class HintAction(StrEnum):
    """The actions that Baton knows, and all others."""

    RETAIN = "kv.retain"
    EVICT = "kv.evict"
    OTHER = "other"


class HintOutcome(StrEnum):
    """What became of a hint."""

    APPLIED = "applied"
    UNKNOWN = "unknown"  # of an unknown type or version
    INVALID = "invalid"  # its payload


class _Payload(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Retain(_Payload):
    """The payload of `kv.retain`."""

    ttl_seconds: Annotated[float, Field(ge=0, le=MAX_RETENTION_S)] = RETENTION_S
    priority: Annotated[int, Field(ge=0, le=100)] = 100

    @property
    def retention_s(self) -> float:
        return self.ttl_seconds if self.priority else 0.0


@dataclass
class CacheHints:
    """What the hints of a request ask of caches; `retention_s` is None without such a hint."""

    retention_s: float | None = None
    ends_session: bool = False

    def apply(self, action: pb.KvHintAction) -> HintOutcome:
        """Apply one action, and return what became of it."""
        if not _is_known(action.action_version):
            return HintOutcome.UNKNOWN
        payload = action.payload or "{}"
        try:
            match action.action_type:
                case HintAction.RETAIN:
                    self.retention_s = _Retain.model_validate_json(payload).retention_s
                case HintAction.EVICT:
                    _Payload.model_validate_json(payload)
                    self.ends_session = True
                case _:
                    return HintOutcome.UNKNOWN
        except ValidationError:
            return HintOutcome.INVALID
        return HintOutcome.APPLIED


def session_named(request: pb.GenerateRequest, metadata: Mapping[str, str | bytes]) -> str:
    """Return the name of the session that a request, or else its call, belongs to; "" if none."""
    named = (str(metadata[key]) for key in SESSION_KEYS if key in metadata)
    return request.session_id or next(named, "")


def hint_violations(hints: pb.KvHints) -> Iterator[FieldViolation]:
    """Yield the fields of a request's hints that are outside their limits."""
    yield from _too_long("kv_hints.message_id", hints.message_id, MAX_HINT_NAME_BYTES)
    if (count := len(hints.actions)) > MAX_HINTS:
        yield FieldViolation("kv_hints.actions", f"has {count} entries, the limit is {MAX_HINTS}")
        return
    for index, action in enumerate(hints.actions):
        where = f"kv_hints.actions[{index}]"
        for field in ("action_id", "action_type", "action_version"):
            yield from _too_long(f"{where}.{field}", getattr(action, field), MAX_HINT_NAME_BYTES)
        yield from _too_long(f"{where}.payload", action.payload, MAX_PAYLOAD_BYTES)


def outcomes(hints: pb.KvHints) -> tuple[CacheHints, list[tuple[HintAction, HintOutcome]]]:
    """Return what the hints ask for, and what became of each of them."""
    asked, found = CacheHints(), list[tuple[HintAction, HintOutcome]]()
    for action in hints.actions:
        outcome = asked.apply(action) if _is_known(hints.protocol_version) else HintOutcome.UNKNOWN
        found.append((_known_action(action.action_type), outcome))
    return asked, found


def cache_session(
    name: str, hints: CacheHints, *, client: str, salt: str, request_id: str
) -> types_pb2.CacheSession | None:
    """Return the session for the workers, or None without one.

    Sessions of different clients and salts are different. A request that belongs to none, and is to
    be retained, is a session of its own.
    """
    if not name and not hints.retention_s:
        return None
    parts = ("session", client, salt, name) if name else ("request", client, salt, request_id)
    return types_pb2.CacheSession(
        digest=_digest(parts),
        client=client_digest(client),
        retention_s=RETENTION_S if hints.retention_s is None else hints.retention_s,
        ends=hints.ends_session,
    )


def client_digest(client: str) -> bytes:
    """Return the name of a client for the workers."""
    return _digest(("client", client))


def _digest(parts: Iterable[str]) -> bytes:
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in map(str.encode, parts):
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.digest()


def _is_known(version: str) -> bool:
    return version.partition(".")[0] in MAJOR_VERSIONS


def _known_action(name: str) -> HintAction:
    return next((action for action in HintAction if action == name), HintAction.OTHER)


def _too_long(field: str, text: str, most: int) -> Iterator[FieldViolation]:
    if (size := len(text.encode())) > most:
        yield FieldViolation(field, f"has {size} bytes, the limit is {most}")
