"""One forming of a pool: how its members recognize each other's frames.

The leader makes a `Forming` and sends it to every member over its Join stream. From its key both
ends of each direction derive the UCX tag, the first frame number, and the key of the
authenticators:

    frame    <16s Q …   authenticator, number, content; the authenticator covers everything after it

Numbers count the frames of a direction, from a start that is unknown outside the pool. A member
accepts only the next number. So it rejects a frame that was recorded, reordered, sent to another
member, or made in another forming or pool, and detects a missing one.
"""

import struct
from dataclasses import dataclass, field
from itertools import permutations

from transfer.transport.authenticator import KEY_BYTES, SEAL_BYTES, AnyBytes, Authenticator, derived
from transfer.transport.refusals import RefusalReason

HEAD_BYTES = SEAL_BYTES + 8
_NUMBER = struct.Struct("<Q")
_PLACE = struct.Struct("<QQII")
_MASK = (1 << 64) - 1
_FRAMES = "baton frames"
_SECRET_BYTES = KEY_BYTES + 16
_MAX_EARLIER = 4096  # tags of earlier formings, kept for the reason of a rejection


@dataclass(frozen=True)
class Forming:
    """One forming of a pool.

    `members` are the incarnations of the pool's processes by rank. `session` is a random number of
    64 bits. `epoch` counts the formings of a pool across successive leaders.
    """

    epoch: int
    session: int
    members: tuple[str, ...]
    key: bytes = field(repr=False)

    @property
    def room(self) -> str:
        """Return the name under which members meet for links, which is secret outside the pool."""
        return self.secret("baton links", 0, 0, 16).hex()

    def secret(self, purpose: str, sender: int, receiver: int, num_bytes: int) -> bytes:
        """Return bytes that are derived for one direction."""
        return derived(
            self.key,
            purpose,
            _PLACE.pack(self.session, self.epoch, sender, receiver),
            *(member.encode() for member in self.members),
            num_bytes=num_bytes,
        )


class Direction:
    """Messages from one member to another: their tag, key and next number. Each end has a copy."""

    def __init__(self, forming: Forming, purpose: str, sender: int, receiver: int) -> None:
        secret = forming.secret(purpose, sender, receiver, _SECRET_BYTES)
        self.authenticator = Authenticator(secret[:KEY_BYTES])
        self.tag = _tag(secret)
        (self.next,) = _NUMBER.unpack_from(secret, KEY_BYTES + 8)

    def seal(self, message: AnyBytes, label: bytes = b"") -> bytes:
        """Return the authenticator of a message with the next number."""
        return self.authenticator.seal(self.next, message, label)

    def advance(self) -> None:
        """Advance the number after its use."""
        self.next = (self.next + 1) & _MASK

    def accept(
        self, seal: bytes | memoryview, number: int, message: AnyBytes, label: bytes = b""
    ) -> RefusalReason | None:
        """Return None and advance if the message is the next one, else the reason of its rejection."""
        if not self.authenticator.accepts(seal, number, message, label):
            return RefusalReason.DAMAGED
        if number != self.next:
            return (
                RefusalReason.REPLAYED
                if (self.next - number) & _MASK <= _MASK >> 1
                else RefusalReason.SKIPPED
            )
        self.advance()
        return None


class FrameSeals:
    """Frame authenticators of one member of a forming, in both directions."""

    def __init__(self, forming: Forming, rank: int) -> None:
        ranks = range(len(forming.members))
        self._to = {
            other: Direction(forming, _FRAMES, rank, other) for other in ranks if other != rank
        }
        self._from = {
            other: Direction(forming, _FRAMES, other, rank) for other in ranks if other != rank
        }
        self._sender_by_tag = {direction.tag: other for other, direction in self._from.items()}
        self.tags = frozenset(
            _tag(forming.secret(_FRAMES, *pair, _SECRET_BYTES)) for pair in permutations(ranks, 2)
        )
        """Tags of all directions of the forming."""

    def sender(self, tag: int) -> int | None:
        """Return the rank of the member that sends to this one under the tag, or None."""
        return self._sender_by_tag.get(tag)

    def tag_to(self, rank: int) -> int:
        return self._to[rank].tag

    def seal(self, rank: int, frame: bytearray) -> int:
        """Fill in the first `HEAD_BYTES` of a frame to this member, and return its tag."""
        direction = self._to[rank]
        number = direction.next
        _NUMBER.pack_into(frame, SEAL_BYTES, number)
        frame[:SEAL_BYTES] = direction.authenticator.seal(number, memoryview(frame)[SEAL_BYTES:])
        direction.next = number + 1 & _MASK
        return direction.tag

    def open(self, rank: int, frame: memoryview) -> RefusalReason | None:
        """Return the reason to reject a frame of this member, or None if it is the next one."""
        if len(frame) < HEAD_BYTES:
            return RefusalReason.DAMAGED
        (number,) = _NUMBER.unpack_from(frame, SEAL_BYTES)
        return self._from[rank].accept(frame[:SEAL_BYTES], number, frame[SEAL_BYTES:])


class EarlierTags:
    """Tags of the latest formings before the current one."""

    def __init__(self) -> None:
        self._tags: dict[int, None] = {}

    def add(self, tags: frozenset[int]) -> None:
        self._tags.update(dict.fromkeys(tags))
        while len(self._tags) > _MAX_EARLIER:
            del self._tags[next(iter(self._tags))]

    def __contains__(self, tag: int) -> bool:
        return tag in self._tags


def _tag(secret: bytes) -> int:
    (tag,) = _NUMBER.unpack_from(secret, KEY_BYTES)
    return int(tag)
