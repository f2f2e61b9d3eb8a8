"""`baton load`'s two clients against one router: the same load gives the same tokens through either
service."""

from pathlib import Path

from baton.load import Endpoint, run_load
from baton.vllm_client import AsyncVllmEngineClient
from baton.workload import Planned, make_queries
from tests.support.cluster.one_process import cluster_in_process


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
