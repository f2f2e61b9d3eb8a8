"""Any changed byte, swapped item or damaged trailer is found, for every lane, epoch and session."""

from dataclasses import replace

import pytest

from engine.memory.layout import CacheKind
from transfer.plan.copy_plan import Item, Lane
from transfer.plan.handoff_terms import DestinationTerms
from transfer.plan.item_seals import LaneSeals, differing
from transfer.transport.authenticator import SEAL_BYTES, new_key

ITEM = Item(3, CacheKind.KV, 10, 20, 2, 64, 8)
LANE = Lane(0, 1, 5 << 24, 0, (ITEM, ITEM._replace(layer_id=4)))
TERMS = DestinationTerms("s", 1, 5 << 24, (1,), 0, (), "plan", new_key())
DATA = bytes(range(64))


def test_both_sides_make_the_same() -> None:
    assert LaneSeals(TERMS, LANE).seal(memoryview(DATA), 1) == LaneSeals(TERMS, LANE).seal(
        memoryview(DATA), 1
    )


def test_every_flipped_bit_changes_the_authenticator() -> None:
    data, seals = bytearray(DATA), LaneSeals(TERMS, LANE)
    made = {seals.seal(memoryview(data), 0)}
    for bit in range(64 * 8):
        data[bit // 8] ^= 1 << bit % 8
        made.add(seals.seal(memoryview(data), 0))
        data[bit // 8] ^= 1 << bit % 8
    assert len(made) == 64 * 8 + 1


@pytest.mark.parametrize(
    ("terms", "lane", "index"),
    [
        (TERMS, LANE, 1),
        (replace(TERMS, session_id="t"), LANE, 0),
        (replace(TERMS, epoch=2), LANE, 0),
        (replace(TERMS, plan_digest="other"), LANE, 0),
        (replace(TERMS, key=new_key()), LANE, 0),
        (TERMS, replace(LANE, source_stage=1), 0),
        (TERMS, replace(LANE, dest_stage=0), 0),
        (TERMS, replace(LANE, tag_base=6 << 24), 0),
        (TERMS, replace(LANE, offset=3), 0),
    ],
    ids=["item", "session", "epoch", "plan", "key", "source", "destination", "base", "offset"],
)
def test_the_same_bytes_elsewhere_have_another_one(
    terms: DestinationTerms, lane: Lane, index: int
) -> None:
    assert LaneSeals(terms, lane).seal(memoryview(DATA), index) != LaneSeals(TERMS, LANE).seal(
        memoryview(DATA), 0
    )


def test_a_trailer_gives_its_authenticators_back_and_every_damage_is_found() -> None:
    seals = LaneSeals(TERMS, LANE)
    items = [seals.seal(memoryview(DATA), index) for index in range(2)]
    trailer = seals.pack_trailer(items)
    assert len(trailer) == seals.trailer_bytes == 3 * SEAL_BYTES
    assert seals.unpack_trailer(trailer) == items
    assert LaneSeals(replace(TERMS, epoch=2), LANE).unpack_trailer(trailer) is None
    for bit in range(8 * len(trailer)):
        trailer[bit // 8] ^= 1 << bit % 8
        assert seals.unpack_trailer(trailer) is None
        trailer[bit // 8] ^= 1 << bit % 8


def test_differing_items_are_named() -> None:
    assert differing([b"a", b"b", b"c"], [b"a", b"x", b"y"]) == [1, 2]


def test_terms_do_not_show_their_key() -> None:
    assert "key" not in repr(TERMS)
