"""Proof that a lane's received items are those that its source sent for this epoch and session.

The destination makes a random key for each epoch of a session, which is sent in its terms over gRPC
only. From it both sides derive a key for each lane. The source computes an authenticator of each
item as it sends it, and ends the lane with the *trailer*: the authenticators in item order, then
one of the trailer itself. Each authenticator uses the tag of its message as its number. So an item
in another item's place, or of another lane, session, epoch or pool, does not match, even if its
bytes are intact.
"""

import hmac
from collections.abc import Sequence

from engine.memory.layout import Buffer
from transfer.plan.copy_plan import Lane
from transfer.plan.handoff_terms import DestinationTerms
from transfer.transport.authenticator import SEAL_BYTES, Authenticator, derived
from transfer.transport.protocol import host_bytes


class LaneSeals:
    """Authenticators of one lane's messages, computed by either side."""

    def __init__(self, destination: DestinationTerms, lane: Lane) -> None:
        place = f"{destination.epoch} {lane.source_stage} {lane.dest_stage}"
        self._lane = lane
        self._authenticator = Authenticator(
            derived(
                destination.key,
                "baton lane",
                destination.session_id.encode(),
                destination.plan_digest.encode(),
                place.encode(),
            )
        )

    @property
    def trailer_bytes(self) -> int:
        return (len(self._lane.items) + 1) * SEAL_BYTES

    def seal(self, content: Buffer, index: int) -> bytes:
        """Return the authenticator of an item's bytes on the host."""
        return self._authenticator.seal(self._lane.tag(index), host_bytes(content))

    def pack_trailer(self, seals: Sequence[bytes]) -> bytearray:
        """Return the trailer of a lane whose items have these authenticators, in item order."""
        body = b"".join(seals)
        return bytearray(body + self._authenticator.seal(self._lane.trailer_tag, body))

    def unpack_trailer(self, trailer: bytes | bytearray) -> list[bytes] | None:
        """Return the authenticators in item order, or None if the trailer itself is not authentic."""
        body = bytes(trailer[:-SEAL_BYTES])
        if not self._authenticator.accepts(
            bytes(trailer[-SEAL_BYTES:]), self._lane.trailer_tag, body
        ):
            return None
        return [body[start : start + SEAL_BYTES] for start in range(0, len(body), SEAL_BYTES)]


def differing(ours: Sequence[bytes], theirs: Sequence[bytes]) -> list[int]:
    """Return the indices at which two lists of authenticators differ, in constant time."""
    return [
        index
        for index, pair in enumerate(zip(ours, theirs, strict=True))
        if not hmac.compare_digest(*pair)
    ]
