import pytest

from baton.client import AsyncBatonClient
from baton.load import LoadPlan, Outcome, Slo, goodput, percentiles, random_queries, run_load, summarise
from baton.values import ModelInfo, Query, Timings
from tests.support.generation import EchoGeneration, serve_echo


def outcome(*times_s: float, tokens: int | None = None, error: str | None = None) -> Outcome:
    return Outcome(times_s[0] if times_s else None, times_s, len(times_s) if tokens is None else tokens, None, error)


def test_figures_by_hand() -> None:
    seen = outcome(1.0, 1.5, 3.0)
    assert seen.tpot_s == 1.0  # (3 - 1) / 2
    assert seen.itl_s == (0.5, 1.5)
    assert outcome(1.0, 3.0, tokens=5).tpot_s == 0.5  # several tokens per message
    assert outcome(1.0).tpot_s is None


def test_goodput_counts_requests_that_keep_both_limits() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.5)
    failed = outcome(0.5, error="UNAVAILABLE")
    outcomes = [outcome(1.0, 1.5), outcome(1.1, 1.2), outcome(0.1, 0.7), outcome(0.5), failed]
    assert [slo.is_met(item) for item in outcomes] == [True, False, False, True, False]
    assert goodput(outcomes, slo, duration_s=4.0) == 0.5


def test_arrivals_are_repeatable_and_have_the_asked_rate() -> None:
    times = LoadPlan(rate=20.0, seed=3).arrivals(4000)
    assert times == LoadPlan(rate=20.0, seed=3).arrivals(4000)
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(20.0, rel=0.05)


async def test_load_against_a_server_records_successes_and_failures() -> None:
    server, address = await serve_echo(EchoGeneration())
    async with AsyncBatonClient(address) as client:
        done, refused = await run_load(client, [Query("one two"), Query("full")], LoadPlan(rate=100))
    await server.drain(grace_s=0)
    assert (done.num_tokens, done.error) == (2, None)
    assert done.timings is not None
    assert done.timings.prefill_s == 0.25
    assert (refused.num_tokens, refused.ttft_s, refused.error) == (0, None, "OUT_OF_CAPACITY")


def test_percentiles_by_hand() -> None:
    values = percentiles([float(i) for i in range(101)], "x_s")
    assert values == {"x_s_p50": 50.0, "x_s_p90": 90.0, "x_s_p99": 99.0, "x_s_mean": 50.0}
    assert percentiles([], "x_s")["x_s_p50"] is None


def test_summary_of_one_good_and_one_failed_request() -> None:
    good = Outcome(0.1, (0.1, 0.3), 3, Timings(prefill_s=0.08, transfer_exposed_s=0.02), None)
    failed = Outcome(None, (), 0, None, "UNAVAILABLE")
    values = summarise([good, failed], Slo(ttft_s=0.2, tpot_s=0.2), duration_s=2.0)
    assert (values["requests"], values["failed"], values["output_tokens_per_s"]) == (2, 1, 1.5)
    assert values["tpot_s_p50"] == pytest.approx(0.1)
    assert values["itl_s_p50"] == pytest.approx(0.2)
    assert (values["handoff_exposed_s_mean"], values["prefill_s_mean"]) == (0.02, 0.08)
    assert (values["goodput_per_s"], values["slo_attainment"]) == (0.5, 0.5)


def test_random_queries_fit_the_model_and_never_end_early() -> None:
    info = ModelInfo("m", "M", 16, 64, 1, (7,), has_tokenizer=False, has_chat_template=False, revision="")
    queries = random_queries(info, count=50, prompt_tokens=8, output_tokens=3, seed=1)
    assert queries == random_queries(info, count=50, prompt_tokens=8, output_tokens=3, seed=1)
    assert {len(query.prompt) for query in queries} <= set(range(4, 13))
    assert all(isinstance(token, int) and token < 16 and token != 7 for query in queries for token in query.prompt)
    assert all(query.stop.ignore_eos and query.stop.max_tokens == 3 for query in queries)
