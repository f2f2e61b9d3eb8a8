"""What the overload benchmark makes of the replies it saw, by hand."""

from bench.overload import LoadCell, LoadReply, bars, missed


def served(sent_s: float, placed_s: float, ended_s: float) -> LoadReply:
    return LoadReply(sent_s, sent_s, ended_s, placed_s)


def test_a_named_wait_is_held_against_the_last_one_let_in_before() -> None:
    cell = LoadCell(2, 5.0, 10.0)
    cell.answers += [served(0.0, 0.0, 1.0), served(1.0, 4.0, 6.0), served(3.0, 9.0, 11.0),
                     LoadReply(2.0, 2.0, 2.01, error="OUT_OF_CAPACITY", refused_for_s=3.0),  # it was 4 - 2
                     LoadReply(3.95, 3.95, 3.96, error="OUT_OF_CAPACITY", refused_for_s=1.0),  # it was 9 - 3.95
                     LoadReply(2.5, 2.5, 7.5, error="DEADLINE_EXCEEDED")]
    assert cell.waits() == [(3.0, 2.0), (1.0, 9.0 - 3.95)]
    assert cell.in_time_per_s == 0.2, "one ended after requests had stopped coming"


def test_bars_compare_with_the_load_that_can_just_be_served() -> None:
    once, twice = LoadCell(1, 5.0, 10.0), LoadCell(2, 5.0, 10.0)
    once.answers += [served(i, i, i + 0.5) for i in range(10)]
    twice.answers += [served(i, i, i + 0.5) for i in range(8)]
    figures = bars([once, twice])
    assert figures["goodput_kept"] == 0.8
    assert missed(figures) == ["goodput_kept 0.8 is below 0.9"]
