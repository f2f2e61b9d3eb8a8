"""A process that found the UCX ports of a cluster floods them: no output changes, no pool forms
again, all messages are counted."""

import asyncio
import ipaddress
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.fork_server import Here
from tests.support.cluster.clusters import RunningCluster, running_cluster, scrape
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ("prefill-0", "decode-0.0", "decode-0.1")
FLOOD_S = 6


@dataclass(frozen=True)
class WithTelling(Here):
    """Workers write their UCX addresses into a folder."""

    folder: Path

    def program(
        self, name: str, module: str, arguments: Sequence[str]
    ) -> tuple[str, Sequence[str]]:
        if name not in WORKERS:
            return module, arguments
        return "tests.support.pool.telling_worker", (str(self.folder), module, *arguments)


async def refused(running: RunningCluster) -> dict[str, float]:
    """Return the largest count of one reason, by worker."""
    ports = {name: await running.metrics_port(name) for name in WORKERS}
    return {name: scrape(port)["baton_refused_messages"] for name, port in ports.items()}


def told(folder: Path) -> list[str]:
    """Return the addresses that workers have written."""
    return [path.read_text() for path in sorted(folder.glob("*-*-*-*")) if not path.suffix]


async def test_a_flood_of_a_stranger_changes_no_response_or_formation(
    checkpoint: Path, reference: Reference, tmp_path: Path
) -> None:
    questions = make_questions(8, seed=11)
    expected = on_the_wire(reference.answers(questions))
    async with running_cluster(checkpoint, decode_pp=2, places=WithTelling(tmp_path)) as running:
        pids = {name: process.pid for name, process in running.cluster.processes.items()}
        addresses = told(tmp_path)
        assert len(addresses) == 5, (
            "a transfer worker each, and two ends of the channel between stages"
        )
        running.lines.clear()
        flood = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.transfer.stranger",
            str(FLOOD_S),
            *addresses,
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        num_rounds = 0
        while flood.returncode is None or num_rounds < 2:
            answers = await asyncio.gather(
                *(
                    running.client.complete(as_query(question), timeout_s=60)
                    for question in questions
                )
            )
            assert [shown(answer) for answer in answers] == expected
            num_rounds += 1
        assert flood.stdout is not None
        assert int(await flood.stdout.read()) > 100, "so many to each address"
        counts = await refused(running)
        assert all(count > 100 for count in counts.values()), counts
        lines = list(running.lines)
        assert not [
            line for line in lines if "not serving" in line or "join" in line or "broke" in line
        ], lines
        assert any(
            "frames between stages: rejected" in line and "(foreign)" in line for line in lines
        )
        assert any("items of handoffs: rejected" in line and "(foreign)" in line for line in lines)
        await running.until_clean()
        assert {name: process.pid for name, process in running.cluster.processes.items()} == pids


async def test_a_local_cluster_is_reached_from_this_machine_alone(checkpoint: Path) -> None:
    """This holds for gRPC and UCX; stages still exchange data by shared memory."""
    async with running_cluster(checkpoint, decode_pp=2) as running:
        for name, process in running.cluster.processes.items():
            listening = [
                connection.laddr.ip.removeprefix("::ffff:")
                for connection in psutil.Process(process.pid).net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
            assert listening, name
            assert all(ipaddress.ip_address(host).is_loopback for host in listening), (
                name,
                listening,
            )
        lines = list(running.lines)
        assert sum("UCX listens on lo (127.0.0.1)" in line for line in lines) == len(WORKERS)
        assert any(
            "stage channel: UCX transports" in line and "posix/" in line for line in lines
        ), lines
