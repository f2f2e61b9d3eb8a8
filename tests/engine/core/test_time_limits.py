"""How long a step may take: the setting, or a multiple of what steps take."""

from engine.core.time_limits import FACTOR, WINDOW, FrameLimit


def test_short_steps_leave_the_setting() -> None:
    limit = FrameLimit(10.0)
    assert limit.seconds == 10.0
    limit.measured(0.02)
    assert limit.seconds == 10.0


def test_long_steps_extend_it_for_as_long_as_they_are_recent() -> None:
    limit = FrameLimit(10.0)
    limit.measured(5.0)
    for _ in range(WINDOW - 1):
        limit.measured(0.1)
        assert limit.seconds == FACTOR * 5.0
    limit.measured(0.1)
    assert limit.seconds == 10.0
