import itertools
import random
import statistics
from pathlib import Path

import pytest

from baton.values import ModelInfo
from baton.workload import (
    Arrivals,
    Lengths,
    Planned,
    Process,
    Shape,
    make_queries,
    plan,
    read_trace,
    superposed,
)
from runtime.errors import ConfigError

INFO = ModelInfo("m", "M", 16, 64, 1, (7,), has_tokenizer=False, has_chat_template=False, revision="")


def test_poisson_arrivals_have_the_asked_rate_and_spread() -> None:
    times = Arrivals(Process.POISSON, rate=20.0).times(4000, random.Random(3))
    assert times == Arrivals(Process.POISSON, rate=20.0).times(4000, random.Random(3))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 20, rel=0.1)  # an exponential's deviation is its mean


def test_constant_and_burst_arrivals_by_hand() -> None:
    assert Arrivals(Process.CONSTANT, rate=4).times(4, random.Random(0)) == [0.0, 0.25, 0.5, 0.75]
    assert Arrivals(Process.BURST, rate=2, burst=3).times(7, random.Random(0)) == [0.0] * 3 + [1.5] * 3 + [3.0]


@pytest.mark.parametrize(("text", "mean", "deviation", "least", "most"), [
    ("192", 192, 0, 192, 192), ("uniform:96-288", 192, 193 / 12 ** 0.5, 96, 288),
    ("normal:192,48", 192, 48, 1, 500), ("exponential:192", 192, 192, 1, 4000)])
def test_lengths_have_the_distribution_they_are_named_for(text: str, mean: float, deviation: float, least: int,
                                                          most: int) -> None:
    rng = random.Random(1)
    drawn = [Lengths.parse(text).draw(rng) for _ in range(5000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.05, abs=1e-9)
    assert least <= min(drawn) <= max(drawn) <= most


@pytest.mark.parametrize("text", ["", "none", "0", "-3", "uniform:5", "uniform:9-3", "normal:5", "zipf:3", "9999999"])
def test_a_length_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="prompt_tokens must be"):
        Lengths.parse(text, field="prompt_tokens")


def test_traces_of_both_spellings_are_replayed(tmp_path: Path) -> None:
    ours, published = tmp_path / "ours.jsonl", tmp_path / "published.jsonl"
    ours.write_text('{"at_s": 10, "prompt_tokens": 5, "output_tokens": 2}\n'
                    '{"at_s": 13, "prompt_tokens": 9, "output_tokens": 1}\n')
    published.write_text('{"timestamp": 10000, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n\n'
                         '{"timestamp": 13000, "input_length": 9, "output_length": 1, "hash_ids": []}\n')
    assert read_trace(ours) == [Planned(0.0, 5, 2), Planned(3.0, 9, 1)]
    assert read_trace(published) == [Planned(0.0, 5, 2, (1,)), Planned(3.0, 9, 1)]
    assert read_trace(ours, speed=2.0)[1].at_s == 1.5


@pytest.mark.parametrize(("lines", "said"), [
    ("", "has no requests"), ("{", r"\.jsonl:1: needs at_s"), ('{"at_s": 1, "prompt_tokens": 3}', r"\.jsonl:1: needs"),
    ('{"at_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "lengths must be from 1"),
    ('{"at_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "at_s must be finite"),
    ('{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1, "hash_ids": [-1]}', "hash_ids must be from 0"),
    ('{"at_s": 1e400, "prompt_tokens": 1, "output_tokens": 1}', "at_s must be finite"),
    ('{"at_s": 2, "prompt_tokens": 1, "output_tokens": 1}\n{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1}',
     "not in order of time")])
def test_a_trace_that_cannot_be_used_is_refused_naming_the_line(tmp_path: Path, lines: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


def test_queries_fit_the_model_and_never_end_early() -> None:
    planned = plan(50, Arrivals(), Shape(Lengths.parse("uniform:4-12"), Lengths.parse("3")), seed=1)
    assert planned == plan(50, Arrivals(), Shape(Lengths.parse("uniform:4-12"), Lengths.parse("3")), seed=1)
    queries = make_queries(INFO, planned, seed=1)
    assert [len(query.prompt) for query in queries] == [item.prompt_tokens for item in planned]
    assert all(isinstance(token, int) and token < 16 and token != 7 for query in queries for token in query.prompt)
    assert all(query.stop.ignore_eos and query.stop.max_tokens == 3 for query in queries)
    (long,) = make_queries(INFO, [Planned(0, 500, 10)], seed=0)
    assert (len(long.prompt), long.stop.max_tokens) == (54, 10), "cut to the context of 64"


def test_copies_of_a_load_ask_as_much_each_within_its_time() -> None:
    """Three times the requests of 10 s within 10 s; what begins alike within a copy does not across copies."""
    load = [Planned(0.0, 5, 2, (0, 1)), Planned(4.0, 6, 3, (0, 2)), Planned(10.0, 7, 4)]
    assert superposed(load, 1, seed=0) == load
    together = superposed(load, 3, seed=0)
    assert [item.at_s for item in together] == sorted(item.at_s for item in together)
    assert 0 <= together[0].at_s <= together[-1].at_s <= 10
    assert sorted((item.prompt_tokens, item.output_tokens) for item in together) == [
        (5, 2)] * 3 + [(6, 3)] * 3 + [(7, 4)] * 3
    firsts = [item.blocks[0] for item in together if item.blocks]
    assert sorted(firsts.count(first) for first in set(firsts)) == [2, 2, 2]
    assert superposed(load, 3, seed=1) != together
