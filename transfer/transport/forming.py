"""One forming of a pool as its members know it, and how they recognize each other's frames.

The leader makes a `Forming` and sends it to every member over its Join stream. From its key both
ends of each direction derive the tag that UCX carries, the first number of the frames, and the key
of their authenticators:

    frame    <16s Q …   authenticator, number, and what is sent; the authenticator covers all that follows it

Numbers count the frames of a direction, from a start that is not known outside the pool. A member
accepts the next number only. So a frame that was recorded, reordered, left out, sent to another
member, or made in another forming or pool is told from the one that is due.
"""

import struct
from dataclasses import dataclass, field
from itertools import permutations

from transfer.transport.authenticator import KEY_BYTES, SEAL_BYTES, Authenticator, Message, derived
from transfer.transport.refusals import RefusalReason

HEAD_BYTES = SEAL_BYTES + 8
_NUMBER = struct.Struct("<Q")
_PLACE = struct.Struct("<QQII")
_MASK = (1 << 64) - 1
_FRAMES = "baton frames"
_SECRET_BYTES = KEY_BYTES + 16
_MAX_EARLIER = 4096  # tags of formings before, kept for the reason of a refusal


@dataclass(frozen=True)
class Forming:
    """`members` are the incarnations of the pool's processes by rank, `session` is a random number
    of 64 bits. `epoch` counts the formings of a pool, also by successive leaders."""

    epoch: int
    session: int
    members: tuple[str, ...]
    key: bytes = field(repr=False)

    @property
    def room(self) -> str:
        """The name under which members meet for links, which others do not know."""
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
    """What one member sends to one other: its tag, and authenticators under its key with the
    numbers that are next. Each end has its own copy."""

    def __init__(self, forming: Forming, purpose: str, sender: int, receiver: int) -> None:
        secret = forming.secret(purpose, sender, receiver, _SECRET_BYTES)
        self.authenticator = Authenticator(secret[:KEY_BYTES])
        self.tag = _tag(secret)
        (self.next,) = _NUMBER.unpack_from(secret, KEY_BYTES + 8)

    def seal(self, message: Message, label: bytes = b"") -> bytes:
        """Return the authenticator of a message under the number that is next."""
        return self.authenticator.seal(self.next, message, label)

    def advance(self) -> None:
        """The number that is next has been used."""
        self.next = (self.next + 1) & _MASK

    def accept(
        self, seal: bytes | memoryview, number: int, message: Message, label: bytes = b""
    ) -> RefusalReason | None:
        """Return why a message of this number is not the one that is due. Of the due one None,
        once."""
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
    """The frames of one member of a forming, in both directions."""

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
        """Of all directions of the forming."""

    def sender(self, tag: int) -> int | None:
        """Return the rank of the member that sends to this one under the tag."""
        return self._sender_by_tag.get(tag)

    def tag_to(self, rank: int) -> int:
        return self._to[rank].tag

    def seal(self, rank: int, frame: bytearray) -> int:
        """Fill in the first `HEAD_BYTES` of a frame to this member. Return its tag."""
        direction = self._to[rank]
        number = direction.next
        _NUMBER.pack_into(frame, SEAL_BYTES, number)
        frame[:SEAL_BYTES] = direction.authenticator.seal(number, memoryview(frame)[SEAL_BYTES:])
        direction.next = number + 1 & _MASK
        return direction.tag

    def open(self, rank: int, frame: memoryview) -> RefusalReason | None:
        """Return why a frame under this member's tag is not the one that is due."""
        if len(frame) < HEAD_BYTES:
            return RefusalReason.DAMAGED
        (number,) = _NUMBER.unpack_from(frame, SEAL_BYTES)
        return self._from[rank].accept(frame[:SEAL_BYTES], number, frame[SEAL_BYTES:])


class EarlierTags:
    """Tags of formings before the present one, the latest of them."""

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
