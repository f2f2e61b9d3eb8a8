"""Right responses: those of one process, without a handoff, stage, rank, draft or cached prompt."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig
from baton.values import Completion, Query
from bench.storm.verdict import Truth
from tests.support.cluster.queries import comparable

TIMEOUT_S = 60.0


async def truths(
    model: Path,
    questions: Sequence[Query],
    *,
    arithmetic: tuple[str, ...] = (),
    adapters: Path | None = None,
) -> list[Truth]:
    """Return the right response of each question, as the only one; one question after another.

    `arithmetic` are flags of workers on which the bits of responses depend.
    """
    config = ClusterConfig(
        model=model,
        prefill=0,
        decode=0,
        worker=1,
        listen="127.0.0.1:0",
        worker_flags=arithmetic,
        adapters=adapters,
    )
    async with (
        LocalCluster(config, sink=lambda name, line: None) as cluster,
        AsyncBatonClient(cluster.address) as client,
    ):
        return [[await _response(client, question)] for question in questions]


async def _response(client: AsyncBatonClient, question: Query) -> tuple[Completion, ...]:
    plain = replace(question, prefix_cache=False, speculate=False)
    return tuple(map(comparable, await client.choices(plain, timeout_s=TIMEOUT_S)))
