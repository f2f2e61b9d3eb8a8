"""Two router processes in front of the same pools: one is killed, stopped or drained during
responses, and clients get the same bits."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient
from baton.cluster_config import demo_model
from baton.values import (
    ChatMessage,
    Completion,
    Event,
    Finish,
    Query,
    Sampling,
    Stop,
    StructuredOutput,
    Timings,
)
from baton.wire import completions_of
from runtime.errors import BatonError
from tests.support.cluster.clusters import RunningCluster, is_clean, running_cluster
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference

DRAFT = demo_model().parent / "draft"
ROUTERS = ("router", "router-1")
NUM_TOKENS = 48
CHAT = (ChatMessage("user", "Count from 3 by 2."),)
SCHEMA = json.dumps(
    {
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "sizes"],
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{10,14}$"},
            "sizes": {
                "type": "array",
                "items": {"enum": [1, 20, 300]},
                "minItems": 4,
                "maxItems": 6,
            },
        },
        "x-guidance": {"whitespace_flexible": False},
    }
)
LONG = Stop(max_tokens=NUM_TOKENS, ignore_eos=True)
QUERIES = (
    Query(
        "Once upon a time", Sampling(temperature=0), LONG, num_top_logprobs=2, num_prompt_logprobs=1
    ),
    Query(
        "Once upon a time",
        Sampling(temperature=1.1, top_p=0.95, seed=3, repetition_penalty=1.2, presence_penalty=0.3),
        LONG,
        num_top_logprobs=0,
    ),
    Query(CHAT, Sampling(temperature=1.3, seed=11), LONG, num_top_logprobs=0, n=3),
    Query(
        CHAT,
        Sampling(temperature=0.8, seed=4),
        Stop(max_tokens=120),
        structured_output=StructuredOutput(SCHEMA),
    ),
    Query("Tell me", Sampling(temperature=0.9, seed=5), LONG, speculate=False),
)


@pytest.fixture
def patient_connections() -> None:
    """Keep the default timeouts of connections: clients must notice a silent router."""


@asynccontextmanager
async def two_routers(
    model: Path, *flags: str, decode_pp: int = 1, router_flags: tuple[str, ...] = ()
) -> AsyncIterator[RunningCluster]:
    async with running_cluster(
        model, routers=2, decode_pp=decode_pp, worker_flags=flags, router_flags=router_flags
    ) as running:
        yield running


def client_beginning_with(running: RunningCluster, router: str) -> AsyncBatonClient:
    """Return a client whose first call goes to this router."""
    client = AsyncBatonClient(*running.cluster.addresses)
    while client._turns._turn != ROUTERS.index(router):
        client._turns.next()
    return client


async def events_of(
    running: RunningCluster, router: str, query: Query, happens: dict[int, Callable[[], object]]
) -> list[Event]:
    """Return all events of a client that begins with this router; call `happens` after this many
    tokens."""
    events, num_tokens = list[Event](), 0
    async with client_beginning_with(running, router) as client:
        async for event in client.generate(query, timeout_s=60):
            events.append(event)
            num_tokens += 0 if isinstance(event, Finish) else len(event.token_ids)
            for at in [at for at in happens if at <= num_tokens]:
                happens.pop(at)()
    return events


def comparable(events: Sequence[Event]) -> list[Completion]:
    """Return every choice without fields that differ between runs, with chunks joined, since drafts
    may split them differently."""
    return [
        replace(choice, finish=replace(choice.finish, timings=Timings(), request_id=""))
        for choice in completions_of(events)
    ]


async def until_all_is_given_back(running: RunningCluster, *routers: str) -> None:
    """Wait until each of these routers sees all resources released."""
    for router in routers:
        async with AsyncBatonClient(running.cluster.addresses[ROUTERS.index(router)]) as client:
            async with asyncio.timeout(60):
                while not await _clean(client):  # noqa: ASYNC110 (gRPC gives no event)
                    await asyncio.sleep(0.1)


async def _clean(client: AsyncBatonClient) -> bool:
    try:
        return is_clean(await client.cluster_status())
    except BatonError:
        return False  # it is on its way back


def stop_string(whole: Completion) -> str:
    """Return some characters that first occur near the middle of a text."""
    text, middle = whole.text, len(whole.text) // 2
    return next(
        text[middle:end]
        for end in range(middle + 3, len(text))
        if text.find(text[middle:end]) == middle
    )


@pytest.mark.long
async def test_a_response_has_the_same_bits_at_any_death_of_its_router() -> None:
    """Five kinds of requests at once, with drafts: the router dies after none of the witness's
    tokens, its first ones, half, and all but the last."""
    async with two_routers(demo_model(), "--draft", str(DRAFT), decode_pp=2) as running:
        whole = await running.client.complete(QUERIES[4], timeout_s=60)
        queries = [*QUERIES, replace(QUERIES[4], stop=replace(LONG, strings=(stop_string(whole),)))]
        right = [
            comparable([event async for event in running.client.generate(query, timeout_s=60)])
            for query in queries
        ]
        assert right[-1][0].finish.stop_string is not None
        assert len(json.loads(right[3][0].text)["sizes"]) >= 4
        for turn, at in enumerate((0, 2, NUM_TOKENS // 2, NUM_TOKENS - 1)):
            victim = running.cluster.processes[ROUTERS[turn % 2]]
            pid = victim.pid
            asking = [
                asyncio.create_task(events_of(running, ROUTERS[turn % 2], query, {}))
                for query in queries
            ]
            witness = asyncio.create_task(
                events_of(running, ROUTERS[turn % 2], QUERIES[4], {at: victim.kill} if at else {})
            )
            if at == 0:
                await asyncio.sleep(0.02)
                victim.kill()
            answers = [comparable(events) for events in await asyncio.gather(*asking)]
            assert answers == right
            assert comparable(await witness) == right[4]
            await running.cluster.wait_serving(timeout_s=60)
            assert victim.pid != pid, "it was killed"
            await until_all_is_given_back(running, *ROUTERS)


async def test_no_request_is_lost_when_routers_are_killed_under_load(
    checkpoint: Path, reference: Reference
) -> None:
    questions = make_questions(12, seed=31, max_prompt=60, max_tokens=40)
    expected = on_the_wire(reference.answers(questions))
    async with (
        two_routers(checkpoint) as running,
        AsyncBatonClient(*running.cluster.addresses) as client,
    ):

        async def asked(index: int) -> bool:
            await asyncio.sleep(index / 50)
            which = index % len(questions)
            query = replace(as_query(questions[which]), request_id=f"r{index}")
            return shown(await client.complete(query, timeout_s=60)) == expected[which]

        answers = [asyncio.create_task(asked(index)) for index in range(300)]
        for router in ROUTERS:
            await asyncio.sleep(1.5)
            running.cluster.processes[router].kill()
            await running.cluster.wait_serving(timeout_s=60)
        assert all(await asyncio.gather(*answers))
        await until_all_is_given_back(running, *ROUTERS)
        assert sum("was ended by SIGKILL" in line for line in running.lines) == 2


@pytest.mark.long
async def test_a_router_that_hangs_keeps_nothing_and_doubles_nothing(
    checkpoint: Path, reference: Reference
) -> None:
    """It is stopped during responses and continues when others have finished them."""
    questions = [
        replace(question, max_tokens=400) for question in make_questions(4, seed=5, max_prompt=60)
    ]
    expected = on_the_wire(reference.answers(questions))
    async with two_routers(checkpoint) as running:
        hanging = running.cluster.processes["router"].pid
        assert hanging is not None
        asking = [
            asyncio.create_task(
                events_of(
                    running,
                    "router",
                    as_query(question),
                    {} if index else {5: lambda: os.kill(hanging, signal.SIGSTOP)},
                )
            )
            for index, question in enumerate(questions)
        ]
        try:
            answers = [shown(completions_of(events)[0]) for events in await asyncio.gather(*asking)]
            await until_all_is_given_back(running, "router-1")
        finally:
            os.kill(hanging, signal.SIGCONT)
        assert answers == expected
        await until_all_is_given_back(running, *ROUTERS)
        assert (
            shown(await running.client.complete(as_query(questions[0]), timeout_s=60))
            == expected[0]
        )
        assert running.cluster.processes["router"].pid == hanging


@pytest.mark.long
async def test_a_stopping_router_hands_its_streams_over(
    checkpoint: Path, reference: Reference
) -> None:
    """What it cannot finish within `drain_s` goes on at the other one; it leaves with exit code
    0."""
    questions = [
        replace(question, max_tokens=400) for question in make_questions(4, seed=6, max_prompt=60)
    ]
    expected = on_the_wire(reference.answers(questions))
    async with two_routers(checkpoint, router_flags=("--drain-s", "0.1")) as running:
        leaving = running.cluster.processes["router"].pid
        assert leaving is not None
        asking = [
            asyncio.create_task(
                events_of(
                    running,
                    "router",
                    as_query(question),
                    {} if index else {5: lambda: os.kill(leaving, signal.SIGTERM)},
                )
            )
            for index, question in enumerate(questions)
        ]
        answers = [shown(completions_of(events)[0]) for events in await asyncio.gather(*asking)]
        assert answers == expected
        await running.cluster.wait_serving(timeout_s=60)
        await until_all_is_given_back(running, *ROUTERS)
        assert any("router" in line and "ended with exit code 0" in line for line in running.lines)
