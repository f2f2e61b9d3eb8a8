"""`baton load`'s two clients against one router: the same load gives the same tokens through either
service; and its conversations."""

import json
from pathlib import Path

import torch

from baton.load import by_turn
from baton.load_run import Endpoint, LoadConversation, run_load, run_requests
from baton.replays import impatient
from baton.traces import read_trace
from baton.transcripts import recorded_requests
from baton.vllm_client import AsyncVllmEngineClient
from baton.workload import Planned, make_queries
from tests.support.cluster.one_process import cluster_in_process
from tests.support.models.checkpoints import make_checkpoint


async def test_both_services_take_the_same_load(checkpoint: Path) -> None:
    planned = [Planned(0.05 * index, 8 + index, 5) for index in range(6)]
    async with (
        cluster_in_process(checkpoint, router={"vllm_engine": True}) as client,
        AsyncVllmEngineClient(client.targets[0]) as engine,
    ):
        clients: tuple[Endpoint, ...] = (client, engine)
        infos = [await one.model_info() for one in clients]
        assert infos[0].vocab_size == infos[1].vocab_size
        assert infos[0].max_context_tokens == infos[1].max_context_tokens
        for one, info in zip(clients, infos, strict=True):
            outcomes = await run_load(
                one, make_queries(info, planned, seed=1), [item.at_s for item in planned]
            )
            assert [(outcome.error, outcome.num_tokens) for outcome in outcomes] == [(None, 5)] * 6


async def test_later_turns_find_the_conversation_in_the_caches(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=torch.float32)
    page = 16
    async with cluster_in_process(
        model,
        page_size=page,
        chunk_tokens=64,
        router={"pull_tokens": 1, "watch_interval_s": 0.05},
    ) as client:
        info = await client.model_info()
        queries = make_queries(info, [Planned(0.0, 100, 12)] * 3, seed=1)
        new = tuple((4,) * 20 for _ in range(3))
        requests = [
            request
            for index, query in enumerate(queries)
            for request in LoadConversation(query, new).requests(4 * index, 0.0, pause_s=0.5)
        ]
        outcomes = await run_requests(client, requests)
    assert [outcome.error for outcome in outcomes] == [None] * 12
    first, *later = by_turn(outcomes)
    assert (first["prompt_tokens"], first["cached_tokens"]) == (300, 0)
    for number, turn in enumerate(later, 1):
        assert turn["prompt_tokens"] == 3 * (100 + 32 * number)
        num_computed = (turn["prompt_tokens"] or 0) - (turn["cached_tokens"] or 0)
        assert num_computed <= 3 * (20 + 1 + page)


async def test_a_recorded_agent_finds_its_turns_in_the_caches(tmp_path: Path) -> None:
    """A chat of three turns, and beside its second one a sub-agent with a prompt of its own."""
    model = make_checkpoint(tmp_path, "llama", dtype=torch.float32)
    page = 16

    def turn(at_s: float, prompt: int, blocks: range) -> dict[str, object]:
        return {"t": at_s, "in": prompt, "out": 12, "hash_ids": list(blocks), "api_time": 1.0}

    requests = [
        turn(0.0, 100, range(6)),
        {"t": 2.0, "requests": [turn(0.0, 64, range(50, 54))]},
        turn(2.0, 140, range(8)),
        turn(6.0, 180, range(11)),
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"block_size": page, "requests": requests}))
    planned = impatient(read_trace(tmp_path / "trace.json").planned, 0.5)
    async with cluster_in_process(
        model,
        page_size=page,
        chunk_tokens=64,
        router={"pull_tokens": 1, "watch_interval_s": 0.05},
    ) as client:
        info = await client.model_info()
        outcomes = await run_requests(client, recorded_requests(info, planned, seed=1))
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcome.usage.prompt_tokens for outcome in outcomes] == [100, 64, 140, 180]
    assert [outcome.usage.cached_tokens for outcome in outcomes[:2]] == [0, 0]
    # The second turn has 28 tokens after the response of the first one, and so has the third.
    for outcome in outcomes[2:]:
        assert outcome.usage.prompt_tokens - outcome.usage.cached_tokens <= 28 + 1 + page
