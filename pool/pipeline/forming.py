"""Forming of a pool: the leader's new key and session, their messages, and the members' readiness.

    leader ── PoolFormed: key, session, members, addresses ──▶ each other member connects its
    channel
           ◀────────────────────────── StageReady: session ──
    all are ready, the leader's own channel included ─▶ the first frame is sent

Key and session number are new for every forming and travel only over the Join streams.
"""

import secrets
from collections.abc import Iterable, Sequence

from protos import pipeline_pb2 as pb
from runtime.errors import FieldViolation, InvalidRequestError
from transfer.transport.authenticator import KEY_BYTES, new_key
from transfer.transport.forming import Forming


def new_forming(epoch: int, members: Sequence[str]) -> Forming:
    """Return a forming of these members, by rank, with a new key and session number."""
    return Forming(epoch, secrets.randbits(64), tuple(members), new_key())


def forming_to_proto(forming: Forming, addresses: Iterable[bytes]) -> pb.PoolFormed:
    """Return the message to a member; `addresses` are those of all members' channels, by rank."""
    return pb.PoolFormed(
        pool_epoch=forming.epoch,
        channel_addresses=addresses,
        key=forming.key,
        session=forming.session,
        members=forming.members,
    )


def forming_from_proto(message: pb.PoolFormed, *, rank: int, incarnation: str) -> Forming:
    """Return the forming that this member is part of.

    Raises:
        InvalidRequestError: the member is not part of it, or the key is invalid; names the field.
    """
    if len(message.key) != KEY_BYTES:
        raise InvalidRequestError(
            FieldViolation("formed.key", f"must have {KEY_BYTES} bytes, got {len(message.key)}")
        )
    if len(message.members) != len(message.channel_addresses):
        raise InvalidRequestError(
            FieldViolation(
                "formed.members",
                f"must be as many as addresses, {len(message.channel_addresses)}, got "
                f"{len(message.members)}",
            )
        )
    if rank >= len(message.members) or message.members[rank] != incarnation:
        raise InvalidRequestError(
            FieldViolation(
                "formed.members",
                f"must name this process, {incarnation}, as rank {rank}; got {list(message.members)}",
            )
        )
    return Forming(message.pool_epoch, message.session, tuple(message.members), message.key)


class FormingAnswers:
    """The members that have not reported ready for the current forming."""

    def __init__(self) -> None:
        self._session: int | None = None
        self._waiting: set[int] = set()

    def begin(self, forming: Forming) -> None:
        self._session, self._waiting = forming.session, set(range(1, len(forming.members)))

    def end(self) -> None:
        """End the current forming."""
        self._session = None
        self._waiting.clear()

    def is_ready(self, rank: int, session: int) -> bool:
        """Return whether this member was the last to become ready.

        Reports about another forming are ignored.
        """
        if session != self._session or rank not in self._waiting:
            return False
        self._waiting.remove(rank)
        return not self._waiting

    def late(self, forming: Forming) -> frozenset[int]:
        """Return the members that are not ready for this forming; empty when it is over."""
        return frozenset(self._waiting) if self._session == forming.session else frozenset()
