"""Proof that the bytes that arrived are the bytes that left, item by item.

The source digests every item with XXH3 (64 bits) as it sends it and ends the lane with a *trailer*: the digests in item
order, then a digest of the trailer itself. Seeds come from what an item is and where it goes, so an item that landed in
another's place, or comes from another session or epoch, does not match although its bytes are intact.
"""

import struct
from collections.abc import Sequence

import xxhash

from transfer.plan.copy_plan import Item, Lane

_IDENTITY = struct.Struct("<QI16sIIQ")
_DIGEST_BYTES = 8


def item_digest(data: memoryview, item: Item, tag: int) -> int:
    """Digest of an item's bytes under its identity; `tag` brings in session, epoch and place in the plan."""
    identity = _IDENTITY.pack(tag, item.layer_id, item.kind.encode(), item.dest_index, item.num_records, item.num_bytes)
    return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh3_64_intdigest(identity))


def trailer_bytes(lane: Lane) -> int:
    """Size of a lane's trailer."""
    return (len(lane.items) + 1) * _DIGEST_BYTES


def pack_trailer(lane: Lane, digests: Sequence[int]) -> bytearray:
    """The trailer of a lane whose items have these digests, in item order."""
    body = struct.pack(f"<{len(digests)}Q", *digests)
    return bytearray(body + struct.pack("<Q", _own_digest(body, lane)))


def unpack_trailer(lane: Lane, trailer: bytes | bytearray) -> tuple[int, ...] | None:
    """The digests in item order; None when the trailer itself is damaged."""
    body = bytes(trailer[:-_DIGEST_BYTES])
    *digests, own = struct.unpack(f"<{len(lane.items) + 1}Q", trailer)
    return tuple(digests) if own == _own_digest(body, lane) else None


def _own_digest(body: bytes, lane: Lane) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=lane.trailer_tag)
