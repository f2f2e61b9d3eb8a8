"""`python -m tests.bench.severed`: one prefill worker, two decode pools, all on hosts of their own,
and the link to the pool that goes first cut for good.

Prints how many requests had the right answer, how many tries the link cost, and how many were
asked. Ends with 77 where namespaces are refused.
"""

import asyncio
import json
import sys
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig, demo_model
from baton.retry import NO_RETRY
from baton.values import Query, Sampling, Stop
from bench.partition.grid import BETWEEN_HOSTS, Apart
from bench.storm.layouts import DRAIN
from runtime.errors import BatonError, ConfigError
from testing.past_proxies import local_page
from tests.support.network.hosts import Network, become_private, is_private

MODULE, REFUSED = "tests.bench.severed", 77
HOSTS = ("router", "prefill-0", "decode-0", "decode-1")
NUM_REQUESTS = 5
QUERY = Query(tuple(range(5, 105)), Sampling(temperature=0), Stop(max_tokens=4))


async def measure() -> dict[str, int]:
    with Network(HOSTS) as network:
        places = Apart(network)
        config = ClusterConfig(
            model=demo_model(),
            prefill=1,
            decode=2,
            listen=f"{places.host('router')}:0",
            worker_flags=(*BETWEEN_HOSTS, *DRAIN),
            router_flags=("--metrics-host", places.host("router")),
            stop_grace_s=5,
            places=places,
        )
        async with (
            LocalCluster(
                config, sink=lambda name, line: print(f"{name}: {line}", file=sys.stderr)
            ) as cluster,
            AsyncBatonClient(cluster.address, retry=NO_RETRY) as client,
        ):
            expected = await answer(client)
            for source, destination in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
                network.cut(source, destination)
            answers = [await answer(client) for _ in range(NUM_REQUESTS)]
            port = (await cluster.processes["router"].announced(timeout_s=10)).metrics_port
            retries = await asyncio.to_thread(
                retried, f"http://{places.host('router')}:{port}/metrics"
            )
            network.mend()
            return {"asked": NUM_REQUESTS, "right": answers.count(expected), "retries": retries}


async def answer(client: AsyncBatonClient) -> Sequence[int]:
    """Return the tokens of a response; empty for a failed request."""
    try:
        return (await client.complete(QUERY, timeout_s=60)).token_ids
    except BatonError as error:
        print(f"failed: {error}", file=sys.stderr)
        return ()


def retried(url: str) -> int:
    families = text_string_to_metric_families(local_page(url, timeout_s=10))
    return round(
        sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "baton_router_retries_total"
        )
    )


def main() -> int:
    try:
        if not is_private():
            become_private(MODULE)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    print(json.dumps(asyncio.run(measure())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
