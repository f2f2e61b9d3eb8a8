"""Acceptance of frames: of the right formation, between the right members, genuine, and next in
order."""

from dataclasses import replace

import pytest

from tests.support.pool.formings import KEY, forming_of
from transfer.transport.forming import HEAD_BYTES, Direction, EarlierTags, Forming, FrameSeals
from transfer.transport.refusals import RefusalReason

FORMING = forming_of(1, 3)


def sealed(seals: FrameSeals, rank: int, text: bytes = b"text") -> memoryview:
    frame = bytearray(HEAD_BYTES) + text
    seals.seal(rank, frame)
    return memoryview(frame)


def test_frames_are_accepted_once_and_in_order() -> None:
    sender, receiver = FrameSeals(FORMING, 0), FrameSeals(FORMING, 1)
    frames = [sealed(sender, 1, b"%d" % number) for number in range(4)]
    assert [receiver.open(0, frame) for frame in frames] == [None] * 4
    assert [receiver.open(0, frame) for frame in frames] == [RefusalReason.REPLAYED] * 4


def test_a_frame_ahead_of_missing_ones_is_refused_and_accepted_later() -> None:
    sender, receiver = FrameSeals(FORMING, 0), FrameSeals(FORMING, 1)
    first, second = sealed(sender, 1), sealed(sender, 1)
    assert receiver.open(0, second) is RefusalReason.SKIPPED
    assert [receiver.open(0, frame) for frame in (first, second)] == [None, None]


def test_numbers_wrap() -> None:
    sender, receiver = Direction(FORMING, "test", 0, 1), Direction(FORMING, "test", 0, 1)
    sender.next = receiver.next = (1 << 64) - 1
    for number in ((1 << 64) - 1, 0, 1):
        seal = sender.seal(b"text")
        assert sender.next == number
        sender.advance()
        assert receiver.accept(seal, number, b"text") is None
        assert receiver.accept(seal, number, b"text") is RefusalReason.REPLAYED


def test_no_flipped_bit_passes() -> None:
    sender, receiver = FrameSeals(FORMING, 0), FrameSeals(FORMING, 1)
    frame = sealed(sender, 1)
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        assert receiver.open(0, frame) is RefusalReason.DAMAGED
        frame[bit // 8] ^= 1 << bit % 8
    assert receiver.open(0, frame[: HEAD_BYTES - 1]) is RefusalReason.DAMAGED
    assert receiver.open(0, frame) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(FORMING, epoch=2),
        replace(FORMING, session=2),
        replace(FORMING, members=("pool-0", "another", "pool-2")),
        Forming(FORMING.epoch, FORMING.session, FORMING.members, KEY[::-1]),
    ],
)
def test_another_forming_has_other_tags_and_other_authenticators(other: Forming) -> None:
    """Epoch, session, a member's incarnation or the key: each alone is enough."""
    ours = FrameSeals(FORMING, 1)
    assert not ours.tags & FrameSeals(other, 0).tags
    assert ours.sender(FrameSeals(other, 0).tag_to(1)) is None
    assert ours.open(0, sealed(FrameSeals(other, 0), 1)) is RefusalReason.DAMAGED


def test_each_direction_has_a_tag_and_authenticators_of_its_own() -> None:
    members = [FrameSeals(FORMING, rank) for rank in range(3)]
    tags = {
        (sender, receiver): members[sender].tag_to(receiver)
        for sender in range(3)
        for receiver in range(3)
        if sender != receiver
    }
    assert len(set(tags.values())) == 6
    assert {frozenset(tags.values())} == {member.tags for member in members}
    for (sender, receiver), tag in tags.items():
        assert [member.sender(tag) for member in members] == [
            sender if rank == receiver else None for rank in range(3)
        ]
    for sender, receiver in ((0, 2), (1, 0), (2, 1)):  # as if it were from 0 to 1
        assert members[1].open(0, sealed(members[sender], receiver)) is RefusalReason.DAMAGED


def test_first_sequence_numbers_reveal_no_other_counter() -> None:
    starts = {
        Direction(forming_of(epoch, 2), "test", *pair).next
        for epoch in (1, 2)
        for pair in ((0, 1), (1, 0))
    }
    assert len(starts) == 4
    assert all(start > 1 << 32 for start in starts)


def test_a_forming_does_not_show_its_key() -> None:
    assert "key" not in repr(FORMING)


def test_tags_of_earlier_formings_are_kept_within_a_bound() -> None:
    earlier = EarlierTags()
    for start in range(0, 10_000, 100):
        earlier.add(frozenset(range(start, start + 100)))
    assert 9_999 in earlier
    assert 6_000 in earlier
    assert 0 not in earlier
