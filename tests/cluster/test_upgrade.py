"""Processes of two revisions in one cluster, as during an upgrade: answers stay the same, and no
request fails."""

import asyncio
from pathlib import Path

import pytest

from engine.core.request import Request
from tests.support.cluster.clusters import RunningCluster, running_cluster
from tests.support.cluster.other_tree import OtherTree, extract, oldest_compatible
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference

READY_S = 240.0  # the older code's kernels are compiled meanwhile
RESTART_S = 120.0
# One worker at a time; the router, whose restart ends streams, follows last.
STEPS = (
    ("prefill-0",),
    ("decode-0.0", "decode-0.1"),
    ("prefill-1",),
    ("decode-1.0", "decode-1.1"),
)
CLIENTS = 2
QUESTIONS = make_questions(8, seed=37, max_prompt=200, max_tokens=60)


@pytest.fixture(scope="module")
def older_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    revision = oldest_compatible()
    if not revision:
        pytest.skip("needs the repository's history")
    return extract(revision, tmp_path_factory.mktemp("older"))


async def answers(running: RunningCluster, questions: list[Request]) -> list[object]:
    return [
        shown(await running.client.complete(as_query(question), timeout_s=60))
        for question in questions
    ]


def others(running: RunningCluster, tree: Path) -> set[str]:
    """Return the names of the processes that run in this tree."""
    processes = running.cluster.processes.items()
    return {name for name, process in processes if Path(f"/proc/{process.pid}/cwd").samefile(tree)}


async def rounds(
    running: RunningCluster, questions: list[Request], over: asyncio.Event
) -> list[list[object]]:
    """Ask the questions again and again until told to stop."""
    answered = list[list[object]]()
    while not over.is_set():
        answered.append(await answers(running, questions))
    return answered


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize(
    "older", [{"prefill-0"}, {"decode-0.0", "decode-0.1"}, {"router"}], ids=lambda names: min(names)
)
async def test_any_role_may_be_older(
    older: set[str], older_tree: Path, checkpoint: Path, reference: Reference
) -> None:
    expected = on_the_wire(reference.answers(QUESTIONS))
    async with running_cluster(
        checkpoint, decode_pp=2, places=OtherTree(older_tree, older), ready_timeout_s=READY_S
    ) as running:
        assert others(running, older_tree) == older
        assert await answers(running, QUESTIONS) == expected
        await running.until_clean()


@pytest.mark.timeout(600)
@pytest.mark.long
async def test_an_upgrade_under_load_costs_no_request(
    older_tree: Path, checkpoint: Path, reference: Reference
) -> None:
    expected = on_the_wire(reference.answers(QUESTIONS))
    older = {"router", *(name for step in STEPS for name in step)}
    async with running_cluster(
        checkpoint,
        prefill=2,
        decode=2,
        decode_pp=2,
        places=OtherTree(older_tree, older),
        ready_timeout_s=READY_S,
    ) as running:
        assert others(running, older_tree) == older
        over = asyncio.Event()
        asking = [
            asyncio.create_task(rounds(running, QUESTIONS[i::CLIENTS], over))
            for i in range(CLIENTS)
        ]
        for step in STEPS:
            older -= set(step)
            await running.cluster.restart(*step, timeout_s=RESTART_S)
        over.set()
        for i, each in enumerate(asking):
            answered = await each
            assert len(answered) > len(STEPS)
            assert all(one == expected[i::CLIENTS] for one in answered)
        older.clear()
        await running.cluster.processes["router"].restart(grace_s=RESTART_S)
        await running.cluster.wait_serving(timeout_s=RESTART_S)
        assert others(running, older_tree) == set()
        assert await answers(running, QUESTIONS) == expected
        await running.until_clean()
