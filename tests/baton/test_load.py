import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import pytest

from baton.client import AsyncBatonClient
from baton.load import Outcome, Slo, by_turn, errors_of, goodput, percentiles, summarize
from baton.load_run import (
    Endpoint,
    LoadConversation,
    LoadRequest,
    Progress,
    run_load,
    run_requests,
)
from baton.values import Chunk, Event, Query, Timings, Usage
from runtime.errors import UnavailableError
from tests.support.router.generation import EchoGeneration, serve_echo


def outcome(*times_s: float, tokens: int | None = None, error: str | None = None) -> Outcome:
    return Outcome(
        times_s[0] if times_s else None,
        times_s,
        len(times_s) if tokens is None else tokens,
        None,
        error,
    )


def test_figures_by_hand() -> None:
    seen = outcome(1.0, 1.5, 3.0)
    assert seen.tpot_s == 1.0  # (3 - 1) / 2
    assert seen.itl_s == (0.5, 1.5)
    assert seen.e2e_s == 3.0
    assert outcome(1.0, 3.0, tokens=5).tpot_s == 0.5  # several tokens per message
    assert outcome(1.0).tpot_s is None


def test_goodput_counts_requests_that_keep_both_limits() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.5)
    failed = outcome(0.5, error="UNAVAILABLE")
    outcomes = [outcome(1.0, 1.5), outcome(1.1, 1.2), outcome(0.1, 0.7), outcome(0.5), failed]
    assert [slo.is_met(item) for item in outcomes] == [True, False, False, True, False]
    assert goodput(outcomes, slo, duration_s=4.0) == 0.5


async def test_load_against_a_server_records_successes_and_failures() -> None:
    server, address = await serve_echo(EchoGeneration())
    async with AsyncBatonClient(address) as client:
        seen: list[tuple[int, int, int]] = []

        def note(progress: Progress) -> None:
            seen.append(
                (progress.num_sent, progress.num_done + progress.num_failed, progress.num_open)
            )

        began = time.monotonic()
        done, refused = await run_load(
            client, [Query("one two"), Query("full")], [0.0, 0.3], on_progress=note
        )
        took_s = time.monotonic() - began
    await server.drain(grace_s=0)
    assert (done.num_tokens, done.error) == (2, None)
    assert done.timings is not None
    assert done.timings.prefill_s == 0.25
    assert (refused.num_tokens, refused.ttft_s, refused.error) == (0, None, "OUT_OF_CAPACITY")
    assert seen[-1] == (2, 2, 0)
    assert (refused.arrived_s, errors_of([done, refused])) == (0.3, {"OUT_OF_CAPACITY": 1})
    assert 0.3 <= 0.3 + refused.lag_s <= took_s, "it was sent in its time, not before"


def test_percentiles_by_hand() -> None:
    values = percentiles([float(i) for i in range(101)], "x_s")
    assert values == {"x_s_p50": 50.0, "x_s_p90": 90.0, "x_s_p99": 99.0, "x_s_mean": 50.0}
    assert percentiles([], "x_s")["x_s_p50"] is None


def test_summary_of_one_good_and_one_failed_request() -> None:
    good = Outcome(0.1, (0.1, 0.3), 3, Timings(prefill_s=0.08, transfer_exposed_s=0.02), None)
    failed = Outcome(None, (), 0, None, "UNAVAILABLE")
    values = summarize([good, failed], Slo(ttft_s=0.2, tpot_s=0.2), duration_s=2.0)
    assert (values["requests"], values["failed"], values["output_tokens_per_s"]) == (2, 1, 1.5)
    assert values["tpot_s_p50"] == pytest.approx(0.1)
    assert values["itl_s_p50"] == pytest.approx(0.2)
    assert (values["handoff_exposed_s_mean"], values["prefill_s_mean"]) == (0.02, 0.08)
    assert (values["goodput_per_s"], values["slo_attainment"]) == (0.5, 0.5)


def test_figures_of_turns_by_hand() -> None:
    """A failed turn counts in none, and a turn that no conversation reached is not there."""
    outcomes = [
        replace(outcome(0.2), turn=0, usage=Usage(10, 1)),
        replace(outcome(0.4), turn=0, usage=Usage(30, 1)),
        replace(outcome(0.1), turn=1, usage=Usage(20, 1, 15, 8, 4)),
        replace(outcome(error="UNAVAILABLE"), turn=1),
    ]
    first, second = by_turn(outcomes)
    assert (first["turn"], first["requests"], first["prompt_tokens"]) == (1, 2, 40)
    assert first["ttft_s_p50"] == pytest.approx(0.3)
    assert (second["requests"], second["cached_tokens"], second["ttft_s_p90"]) == (1, 15, 0.1)
    assert (second["pulled_tokens"], second["disk_tokens"]) == (8, 4)
    assert by_turn([]) == []


async def test_a_failed_turn_ends_its_conversation() -> None:
    class Failing:
        def __init__(self) -> None:
            self.prompts: list[object] = []

        async def generate(
            self, query: Query, *, timeout_s: float | None = None
        ) -> AsyncGenerator[Event, None]:
            self.prompts.append(query.prompt)
            if query.prompt == (1, 5, 6, 2):
                raise UnavailableError("gone")
            yield Chunk("r", (5, 6), "", (), Usage(1, 2))

    client = Failing()
    progress: list[tuple[int, int]] = []
    outcomes = await run_requests(
        cast(Endpoint, client),
        [
            *LoadConversation(Query((1,)), ((2,), (3,))).requests(0, 0.0),
            *LoadConversation(Query((7,)), ((8,),)).requests(3, 0.0),
        ],
        on_progress=lambda seen: progress.append((seen.num_total, seen.num_done + seen.num_failed)),
    )
    assert [(each.turn, each.error) for each in outcomes] == [
        (0, None),
        (1, "UNAVAILABLE"),
        (0, None),
        (1, None),
    ]
    assert set(client.prompts) == {(1,), (1, 5, 6, 2), (7,), (7, 5, 6, 8)}
    assert progress[-1] == (4, 4)


class Slow:
    """A server that answers 30 ms after the question, and notes when questions came."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seen: list[tuple[object, float]] = []
        self.num_open = self.most_open = 0

    async def generate(
        self, query: Query, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        self.seen.append((query.prompt, time.monotonic() - self.began))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0.03)
        self.num_open -= 1
        if query.prompt == (13,):
            raise UnavailableError("gone")
        yield Chunk("r", (5,), "", (), Usage(1, 1))


def request_of(token: int, at_s: float = 0.0, **others: Any) -> LoadRequest:  # noqa: ANN401
    return LoadRequest(at_s, lambda: Query((token,)), **others)


async def test_a_request_waits_for_all_that_it_follows() -> None:
    """The third follows the first two, of which the second begins 50 ms later."""
    client = Slow()
    outcomes = await run_requests(
        cast(Endpoint, client),
        [
            request_of(1, session=0),
            request_of(2, 0.05, session=0),
            request_of(3, session=0, after=(0, 1), pause_s=0.02),
        ],
    )
    assert [each.error for each in outcomes] == [None] * 3
    assert [prompt for prompt, _ in client.seen] == [(1,), (2,), (3,)]
    assert client.seen[2][1] >= 0.05 + 0.03 + 0.02
    assert outcomes[2].lag_s < 0.05


async def test_what_follows_a_failed_request_is_not_sent() -> None:
    client = Slow()
    progress: list[tuple[int, int]] = []
    outcomes = await run_requests(
        cast(Endpoint, client),
        [
            request_of(13, session=0),
            request_of(1, session=0, after=(0,)),
            request_of(2, session=0, after=(1,)),
            request_of(3, session=1),
        ],
        on_progress=lambda seen: progress.append((seen.num_total, seen.num_done + seen.num_failed)),
    )
    assert [each.error for each in outcomes] == ["UNAVAILABLE", None]
    assert progress[-1] == (2, 2)


async def test_users_begin_a_conversation_when_one_has_ended() -> None:
    """Five conversations of two turns, the second of which has failed when its other turn is due;
    recorded times within a conversation are kept, and its start is not."""
    client = Slow()
    requests = []
    for session in range(5):
        first = 13 if session == 1 else session
        requests += [
            request_of(first, 100.0 * session, session=session),
            request_of(20 + session, session=session, after=(2 * session,)),
        ]
    requests.append(request_of(40, 500.0))
    outcomes = await run_requests(cast(Endpoint, client), requests, users=2)
    assert client.most_open == 2
    assert [each.error for each in outcomes] == [
        *(None, None, "UNAVAILABLE"),
        *([None] * 7),
    ]
    firsts = [prompt for prompt, _ in client.seen]
    assert firsts[:3] == [(0,), (13,), (2,)] or firsts[:4] == [(0,), (13,), (20,), (2,)]
    assert client.seen[-1][1] < 2.0


async def test_turns_of_one_user_keep_their_distance() -> None:
    client = Slow()
    await run_requests(
        cast(Endpoint, client),
        [request_of(1, 7.0, session=0), request_of(2, 7.1, session=0)],
        users=1,
    )
    (_, first_s), (_, second_s) = client.seen
    assert first_s < 0.1
    assert second_s - first_s >= 0.09


async def test_a_cancelled_load_ends_at_once() -> None:
    client = Slow()
    running = asyncio.ensure_future(
        run_requests(
            cast(Endpoint, client),
            [request_of(1, 60.0, session=0), request_of(2, session=0, after=(0,))],
            users=1,
        )
    )
    await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 2.0)


def test_later_turns_are_counted_in_groups() -> None:
    outcomes = [replace(outcome(0.2), turn=turn, usage=Usage(1, 1)) for turn in range(40)]
    assert [
        (each["turn"], each["last_turn"], each["prompt_tokens"]) for each in by_turn(outcomes)
    ] == [*((turn, turn, 1) for turn in range(1, 9)), (9, 16, 8), (17, 32, 16), (33, 40, 8)]
