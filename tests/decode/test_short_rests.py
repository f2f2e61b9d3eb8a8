"""A decode pool that has most of a prompt prefills the rest during its decode steps."""

import pytest

from engine.core.batch import ForwardMode
from runtime.errors import CapacityError
from tests.decode.test_prefix_cache import Rig


def test_a_short_rest_is_computed_on_the_decode_worker() -> None:
    rig = Rig(local_rest_tokens=7)
    first = rig.serve(range(18), max_tokens=6)
    with pytest.raises(
        CapacityError, match="9 tokens of the prompt are not cached, the limit is 7"
    ):
        rig.read_rest([*range(16), *range(50, 59)])
    assert rig.scheduler.load().running_requests == 0
    rig.num_read = 0
    again = rig.read_rest([*first.tokens, 7, 7, 7])
    rig.run()
    assert (again.drawn, again.reservation.held_tokens, rig.num_read) == (again.expected, 20, 7)
    assert rig.read_rest([*again.tokens, 8]).reservation.held_tokens == 28, (
        "what it read and drew is kept"
    )
    assert rig.count("reused_tokens") == 48
    rig.check()


def test_streams_draw_while_a_rest_is_read() -> None:
    """Twenty tokens in three chunks of eight: three tokens for a stream, as many as without."""
    rig = Rig(local_rest_tokens=20)
    rig.serve(range(16))
    stream = rig.reserve(range(50, 60), max_tokens=20)
    rig.join(stream)
    rest = rig.read_rest([*range(16), *range(100, 120)])
    for number in range(1, 4):
        batch = rig.launch()
        assert batch is not None
        assert (batch.mode, batch.request_keys[0]) == (ForwardMode.PREFILL, stream.reservation.key)
        rig.answer(batch)
        assert len(stream.drawn) == number
    assert len(rest.drawn) == 1
    rig.run()
    assert (stream.drawn, rest.drawn) == (stream.expected, rest.expected)
    rig.check()


def test_rests_are_as_short_as_streams_can_bear() -> None:
    """Steps take a second, and one that prefills eight tokens four tenths more: two tokens are a
    tenth. Without streams no request waits, and old measurements are ignored."""
    rig = Rig(local_rest_tokens=8)
    rig.serve(range(16))
    assert rig.scheduler.load().local_rest_tokens == 8
    stream = rig.reserve(range(50, 60), max_tokens=20)
    rig.join(stream)
    for seconds in (1.0, 1.0, 1.4):
        if seconds > 1:
            rest = rig.read_rest([*range(16), *range(100, 108)], max_tokens=1)
        batch = rig.launch()
        assert batch is not None
        rig.clock.advance(seconds)
        rig.answer(batch)
    assert rest.is_finished
    assert rig.scheduler.load().local_rest_tokens == 2
    with pytest.raises(CapacityError, match="the limit is 2"):
        rig.read_rest([*range(16), 7, 7, 7])
    rig.clock.advance(31.0)
    assert rig.scheduler.load().local_rest_tokens == 8
    rig.run()
    assert rig.scheduler.load().local_rest_tokens == 8


def test_nothing_is_read_on_without_a_state() -> None:
    rig = Rig(grid=8, local_rest_tokens=7)
    rig.serve(range(18))
    with pytest.raises(CapacityError):
        rig.read_rest(range(18))
