"""Every metric a role exposes has a name that follows the rules, and moves when what it counts
happens."""

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.observe.catalogue import families
from tests.support.cluster.clusters import RunningCluster, running_cluster, scrape
from tests.support.cluster.questions import as_query, make_questions
from tests.support.models.adapters import write_adapter

# Gauges that are zero again when nothing runs, and what only a fault moves.
AT_REST = {
    "baton_queue_depth",
    "baton_queue_oldest_seconds",
    "baton_router_running",
    "baton_router_paused",
    "baton_requests_in_flight",
    "baton_running",
    "baton_kv_pages_used",
    "baton_state_slots_used",
    "baton_kv_sessions",
    "baton_pp_bubble_ratio",
    "baton_kv_usage_ratio",
    "baton_kv_pages_held_for_transfer",
    "baton_kv_leases",
    "baton_draining",
    "baton_adapter_requests",
}
FAULT_ONLY = {  # without a fault (or, on decode, a preemption) these stay where they are
    "baton_preemptions",
    "baton_kv_transfer_failures",
    "baton_kv_integrity_failures",
    "baton_router_retries",
    "baton_kv_imbalances",
    "baton_handshake_failures",
    "baton_kv_lease_expired",
    "baton_local_prefill",
    "baton_migrations",
    "baton_cache_evicted_pages",
    "baton_draining",
    "baton_discovery_errors",
    "baton_router_refused",
    "baton_router_dropped",
    "baton_client_refused",
    "baton_resumptions",
    "baton_refused_messages",
    "baton_router_paused",
}


# What a cluster that is not short of anything does not move: see tests/pool/stage/test_metrics.py.
SHOWN_ELSEWHERE = {
    # No two of the prompts share a prefix: see tests/prefill/test_prompt_cache.py.
    ("prefill-0", "baton_cache_matched_tokens"),
    ("prefill-0", "baton_cache_reused_tokens"),
    ("decode-0.0", "baton_cache_snapshots"),  # they come with the prompts
    # Without states, which come with the prompts, it writes nothing to its disk cache.
    ("decode-0.0", "baton_cache_tier_blocks"),
    ("decode-0.0", "baton_cache_tier_read_seconds"),
    ("decode-0.0", "baton_cache_tier_used_bytes"),
    # A single worker of each role pulls nothing: see tests/one_process/test_pulls.py.
    *(
        (name, metric)
        for name in ("prefill-0", "decode-0.0")
        for metric in ("baton_pull_blocks", "baton_pull_seconds", "baton_lent_blocks")
    ),
    ("prefill-0", "baton_queue_depth"),
    ("decode-0.0", "baton_queue_depth"),
    ("prefill-0", "baton_queue_oldest_seconds"),
    ("decode-0.0", "baton_queue_oldest_seconds"),
    # A single stage waits for no other and sends to none.
    ("prefill-0", "baton_pp_bubble_ratio"),
    ("prefill-0", "baton_pp_link_bytes"),
    ("decode-0.1", "baton_requests"),
    ("decode-0.1", "baton_request_seconds"),  # a follower serves health alone
    ("decode-0.1", "baton_requests_in_flight"),
    # This model has no experts.
    *(
        (name, metric)
        for name in ("prefill-0", "decode-0.0", "decode-0.1")
        for metric in ("baton_expert_tokens", "baton_expert_busiest_ratio")
    ),
}


async def everything(running: RunningCluster) -> dict[str, dict[str, float]]:
    ports = {name: await running.metrics_port(name) for name in running.cluster.processes}
    return {name: await asyncio.to_thread(scrape, port) for name, port in ports.items()}


async def load_and_look(running: RunningCluster, peaks: dict[str, dict[str, float]]) -> None:
    """Send many requests at once, then the longest prompt twice, then requests for two adapters that
    take turns in memory, and record the maximum of every metric."""
    questions = make_questions(40, seed=2, max_prompt=300, max_tokens=100)
    longest = max(questions, key=lambda question: len(question.prompt_token_ids))

    async def ask() -> None:
        await asyncio.gather(
            *(running.client.complete(as_query(question), timeout_s=60) for question in questions)
        )
        await running.client.flush_caches()  # the disk still has the longest one
        for adapter in ("", "", "a", "b", "a"):
            query = as_query(replace(longest, adapter=adapter))
            query = replace(query, session_id=adapter or "own", retention_s=60.0)
            await running.client.complete(query, timeout_s=60)

    load = asyncio.create_task(ask())
    while not load.done():
        for name, values in (await everything(running)).items():
            for metric, value in values.items():
                peaks.setdefault(name, {})[metric] = max(
                    value, peaks.get(name, {}).get(metric, 0.0)
                )
        await asyncio.sleep(0.1)
    await load


def never_moved(peaks: dict[str, dict[str, float]]) -> dict[str, list[str]]:
    return {
        name: sorted(
            metric
            for metric, value in values.items()
            if value == 0 and metric not in FAULT_ONLY and (name, metric) not in SHOWN_ELSEWHERE
        )
        for name, values in peaks.items()
    }


def disturbed(values: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the metrics that have not returned to zero."""
    zero = AT_REST - {"baton_requests_in_flight", "baton_pp_bubble_ratio"}
    return {
        f"{name} {metric}": value
        for name, metrics in values.items()
        for metric, value in metrics.items()
        if metric in zero and value
    }


async def test_every_metric_moves(
    checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, checkpoint, seed=seed, rank=32)
    disk = tmp_path_factory.mktemp("disk")
    flags = ("--max-running", "4", "--adapters-mb", "1", "--disk-cache", str(disk))
    async with running_cluster(
        checkpoint, decode_pp=2, adapters=tmp_path, worker_flags=flags
    ) as running:
        peaks: dict[str, dict[str, float]] = {}
        end_s = time.monotonic() + 60  # a look can miss what a gauge says for a moment only
        while not peaks or (any(never_moved(peaks).values()) and time.monotonic() < end_s):
            await load_and_look(running, peaks)
        assert not any(never_moved(peaks).values()), (
            f"exposed but never moved: {never_moved(peaks)}"
        )
        await running.until_clean()
        rest = await everything(running)
        async with asyncio.timeout(60):
            while disturbed(rest):
                await asyncio.sleep(0.2)
                rest = await everything(running)
    for name, role in (
        ("router", "router"),
        ("prefill-0", "prefill"),
        ("decode-0.0", "decode"),
        ("decode-0.1", "follower"),
    ):
        known = {
            family.name.removesuffix("_total")
            for family in families()
            if role in family.roles and not family.name.startswith("baton_spec_")
        }
        assert set(rest[name]) == known, (
            f"{name}: what it exports is not what the catalogue says of a {role}"
        )
    for values in rest.values():
        for metric in values:
            assert re.fullmatch(r"baton(_[a-z0-9]+)+", metric), metric
