import itertools
import random
import statistics

import pytest

from baton.replays import superposed
from baton.values import ModelInfo
from baton.workload import (
    Arrivals,
    Fitted,
    Lengths,
    Planned,
    Process,
    Shape,
    TooLong,
    changes,
    fitted,
    make_queries,
    plan,
)
from runtime.errors import ConfigError

INFO = ModelInfo(
    "m", "M", 16, 64, 1, (7,), has_tokenizer=False, has_chat_template=False, revision=""
)


def test_poisson_arrivals_have_the_asked_rate_and_spread() -> None:
    times = Arrivals(Process.POISSON, rate=20.0).times(4000, random.Random(3))
    assert times == Arrivals(Process.POISSON, rate=20.0).times(4000, random.Random(3))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(
        1 / 20, rel=0.1
    )  # an exponential's deviation is its mean


def test_constant_and_burst_arrivals_by_hand() -> None:
    assert Arrivals(Process.CONSTANT, rate=4).times(4, random.Random(0)) == [0.0, 0.25, 0.5, 0.75]
    assert Arrivals(Process.BURST, rate=2, burst=3).times(7, random.Random(0)) == [0.0] * 3 + [
        1.5
    ] * 3 + [3.0]


@pytest.mark.parametrize(
    ("text", "mean", "deviation", "least", "most"),
    [
        ("192", 192, 0, 192, 192),
        ("uniform:96-288", 192, 193 / 12**0.5, 96, 288),
        ("normal:192,48", 192, 48, 1, 500),
        ("exponential:192", 192, 192, 1, 4000),
    ],
)
def test_lengths_have_the_distribution_they_are_named_for(
    text: str, mean: float, deviation: float, least: int, most: int
) -> None:
    rng = random.Random(1)
    drawn = [Lengths.parse(text).draw(rng) for _ in range(5000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.05, abs=1e-9)
    assert least <= min(drawn) <= max(drawn) <= most


@pytest.mark.parametrize(
    "text", ["", "none", "0", "-3", "uniform:5", "uniform:9-3", "normal:5", "zipf:3", "9999999"]
)
def test_a_length_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="prompt_tokens must be"):
        Lengths.parse(text, field="prompt_tokens")


def test_queries_fit_the_model_and_never_end_early() -> None:
    planned = plan(50, Arrivals(), Shape(Lengths.parse("uniform:4-12"), Lengths.parse("3")), seed=1)
    assert planned == plan(
        50, Arrivals(), Shape(Lengths.parse("uniform:4-12"), Lengths.parse("3")), seed=1
    )
    queries = make_queries(INFO, planned, seed=1)
    assert [len(query.prompt) for query in queries] == [item.prompt_tokens for item in planned]
    assert all(
        isinstance(token, int) and token < 16 and token != 7
        for query in queries
        for token in query.prompt
    )
    assert all(query.stop.ignore_eos and query.stop.max_tokens == 3 for query in queries)


LONG = [
    Planned(0, 5, 3),
    Planned(1, 500, 10),
    Planned(2, 61, 3),
    Planned(3, 1, 500),
]  # the context is 64 tokens


def test_a_load_beyond_the_context_needs_an_explicit_option() -> None:
    assert fitted(LONG[:1], 64, TooLong.REFUSE) == Fitted((LONG[0],))
    with pytest.raises(
        ConfigError,
        match=r"^2 of 4 requests are longer than the context of 64 tokens, the longest "
        r"has 510: --too-long skip .* --too-long cut",
    ):
        fitted(LONG, 64, TooLong.REFUSE)
    assert fitted(LONG, 64, TooLong.SKIP) == Fitted((LONG[0], LONG[2]), num_skipped=2)
    assert fitted(LONG, 64, TooLong.CUT) == Fitted(
        (LONG[0], Planned(1, 54, 10), LONG[2], Planned(3, 1, 63)), num_cut=2
    )
    with pytest.raises(
        ConfigError, match="none of the 1 requests fits into the context of 64 tokens"
    ):
        fitted(LONG[1:2], 64, TooLong.SKIP)


def test_deviations_from_the_planned_load_are_reported() -> None:
    assert not list(changes(cut=0, skipped=0, unanswered=0, max_context_tokens=64))
    assert list(changes(cut=1, skipped=2, unanswered=3, max_context_tokens=64)) == [
        "requests cut to the context of 64 tokens: 1",
        "requests skipped as longer than the context of 64 tokens: 2",
        "requests skipped as the trace has no response to them: 3",
    ]


def test_prompts_share_a_prefix_if_their_blocks_do() -> None:
    """Three prompts of blocks of 512 tokens: the first two share one, the third has the second's
    last one."""
    planned = [Planned(0, 600, 1, (1, 2)), Planned(0, 1030, 1, (1, 3)), Planned(0, 512, 1, (3,))]
    first, second, third = (query.prompt for query in make_queries(INFO, planned, seed=5))
    assert [len(prompt) for prompt in (first, second, third)] == [600, 1030, 512]
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    assert second[512:1024] == third
    assert make_queries(INFO, planned, seed=6)[0].prompt[:512] != first[:512]


def test_copies_of_a_load_ask_as_much_each_within_its_time() -> None:
    """Three times the requests of 10 s within 10 s; prefixes are shared within a copy but not
    across copies."""
    load = [Planned(0.0, 5, 2, (0, 1)), Planned(4.0, 6, 3, (0, 2)), Planned(10.0, 7, 4)]
    assert superposed(load, 1, seed=0) == load
    together = superposed(load, 3, seed=0)
    assert [item.at_s for item in together] == sorted(item.at_s for item in together)
    assert 0 <= together[0].at_s <= together[-1].at_s <= 10
    assert (
        sorted((item.prompt_tokens, item.output_tokens) for item in together)
        == [(5, 2)] * 3 + [(6, 3)] * 3 + [(7, 4)] * 3
    )
    firsts = [item.blocks[0] for item in together if item.blocks]
    assert sorted(firsts.count(first) for first in set(firsts)) == [2, 2, 2]
    assert superposed(load, 3, seed=1) != together
