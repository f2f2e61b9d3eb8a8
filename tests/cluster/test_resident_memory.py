"""Memory that a process retains of earlier prompts."""

import asyncio

import pytest

from baton.cluster_config import demo_model
from baton.values import Query, Sampling, Stop
from tests.support.cluster.clusters import running_cluster

LENGTHS, MAX_GROWTH_BYTES = range(2, 902, 3), 100 << 20


@pytest.mark.long
@pytest.mark.parametrize("numerics", ["exact", "fast"])
async def test_300_prompts_of_other_lengths_cost_no_process_more_than_100_mib(
    numerics: str,
) -> None:
    """A library that keeps what it made for each number of tokens took 830 MiB."""
    async with running_cluster(demo_model(), worker_flags=("--numerics", numerics)) as running:

        async def ask(length: int) -> None:
            query = Query(
                tuple(3 + index % 200 for index in range(length)),
                Sampling(temperature=0),
                Stop(max_tokens=1, ignore_eos=True),
                skip_text=True,
            )
            await running.client.complete(query, timeout_s=60)

        for length in (1, 7, 64, 900, 901):  # what the longest needs, and any need once
            await ask(length)
        await running.until_clean()
        before = running.resident_bytes()
        for first in range(0, len(LENGTHS), 4):
            await asyncio.gather(*map(ask, LENGTHS[first : first + 4]))
        await running.until_clean()
        growth = {name: size - before[name] for name, size in running.resident_bytes().items()}
        assert max(growth.values()) <= MAX_GROWTH_BYTES, growth
