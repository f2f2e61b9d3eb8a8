"""Workers that share a cache server over TCP, while workers and the server die by SIGKILL."""

import asyncio
from pathlib import Path

from baton.preflight import free_ports
from tests.cluster.test_disk_cache import KEPT, PAGE, ask, prompts
from tests.support.cache_servers import running_server
from tests.support.cluster.clusters import running_cluster, samples_of
from tests.support.cluster.questions import on_the_wire, shown
from tests.support.cluster.reference import Reference


async def test_a_worker_reads_what_its_predecessor_left_at_the_server(
    checkpoint: Path, reference: Reference, tmp_path: Path
) -> None:
    questions = prompts()[:8]
    expected = on_the_wire(reference.answers(questions))
    (port,) = free_ports("127.0.0.1", 1)
    server_flags = ("--port", str(port), "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    with running_server(tmp_path, *server_flags) as server:
        flags = (
            *("--cache-server", f"redis://127.0.0.1:{port}/0"),
            *("--cache-server-key", str(server.key_file)),
            *("--page-size", str(PAGE)),
        )
        async with running_cluster(checkpoint, prefill_pp=2, worker_flags=flags) as running:
            killed = running.cluster.processes["prefill-0.1"]
            answers = asyncio.create_task(ask(running, questions))
            await asyncio.sleep(0.15)
            killed.kill()
            assert [shown(answer) for answer in await answers] == expected
            await running.cluster.wait_serving(timeout_s=60)
            assert [shown(answer) for answer in await ask(running, questions)] == expected
            await running.until_clean()
            await server.until_quiet()
            running.cluster.processes["prefill-0.0"].kill()
            await asyncio.sleep(0.5)
            await running.cluster.wait_serving(timeout_s=60)
            # Later ones may be computed, if that is faster.
            answered = [answer for each in questions for answer in await ask(running, [each])]
            assert [shown(answer) for answer in answered] == expected
            assert answered[0].finish.usage.server_tokens == KEPT
            tokens = await asyncio.to_thread(
                samples_of, await running.metrics_port("router"), "baton_router_tier_tokens_total"
            )
            assert tokens["server",] >= KEPT

            server.kill()
            await running.client.flush_caches()
            assert [shown(answer) for answer in await ask(running, questions)] == expected
            server.start()
            assert [shown(answer) for answer in await ask(running, questions)] == expected
