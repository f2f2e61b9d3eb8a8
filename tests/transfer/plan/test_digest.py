"""Digests: any changed byte, any swapped item and any damaged trailer is told."""

import pytest

from engine.memory.layout import CacheKind
from transfer.plan.copy_plan import Item, Lane
from transfer.plan.digest import item_digest, pack_trailer, trailer_bytes, unpack_trailer

ITEM = Item(3, CacheKind.KV, 10, 20, 2, 64, 8)
LANE = Lane(0, 1, 1 << 24, (ITEM, ITEM._replace(layer_id=4)))


def test_every_flipped_bit_changes_the_digest() -> None:
    data = bytearray(range(64))
    digests = {item_digest(memoryview(data), ITEM, 5)}
    for i in range(64 * 8):
        data[i // 8] ^= 1 << i % 8
        digests.add(item_digest(memoryview(data), ITEM, 5))
        data[i // 8] ^= 1 << i % 8
    assert len(digests) == 64 * 8 + 1


@pytest.mark.parametrize("other", [ITEM._replace(layer_id=4), ITEM._replace(kind=CacheKind.STATE),
                                   ITEM._replace(dest_index=21), ITEM._replace(num_records=1)])
def test_the_same_bytes_under_another_identity_differ(other: Item) -> None:
    data = memoryview(bytes(64))
    assert item_digest(data, ITEM, 5) != item_digest(data, other, 5)
    assert item_digest(data, ITEM, 5) != item_digest(data, ITEM, 6)


def test_the_source_index_does_not_matter() -> None:
    data = memoryview(bytes(64))
    assert item_digest(data, ITEM, 5) == item_digest(data, ITEM._replace(source_index=99, ready_tokens=1), 5)


def test_a_trailer_gives_its_digests_back_and_every_damage_is_told() -> None:
    trailer = pack_trailer(LANE, [11, 2**64 - 1])
    assert len(trailer) == trailer_bytes(LANE)
    assert unpack_trailer(LANE, trailer) == (11, 2**64 - 1)
    for i in range(len(trailer)):
        trailer[i] ^= 4
        assert unpack_trailer(LANE, trailer) is None
        trailer[i] ^= 4
