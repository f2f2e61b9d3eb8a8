"""Workers of both roles: the bits of one process, alone, next to others of their kind, and next to
pools of one role."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.roles import set_roles
from baton.values import ClusterStatus, Completion, Query, Sampling, Stop
from engine.core.request import Request
from runtime.errors import UnavailableError
from runtime.rpc.client import open_channel
from runtime.security.access import PLAIN_CHANNEL
from tests.cluster.test_rolling import LOST, address_of, migrations
from tests.support.cluster.clusters import RunningCluster, running_cluster, samples_of
from tests.support.cluster.questions import Shown, as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.drafts.eagle import save_draft
from tests.support.grids import mostly_long
from tests.support.models.published import QWEN3_0_6B, write_published

QUESTIONS = make_questions(8)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(tmp_path_factory.mktemp("drafts") / "eagle3", layers=(0, 1, 3))


async def complete(running: RunningCluster, questions: Sequence[Request]) -> list[Completion]:
    return await asyncio.gather(
        *(running.client.complete(as_query(question), timeout_s=60) for question in questions)
    )


async def assert_answers(running: RunningCluster, expected: Sequence[Shown]) -> None:
    """Check the answers twice: of a cold cache and of a warm one."""
    for _ in range(2):
        assert [shown(each) for each in await complete(running, QUESTIONS)] == expected
    await running.until_clean()


async def local_prefills(running: RunningCluster, name: str, reason: str) -> float:
    port = await running.metrics_port(name)
    found = await asyncio.to_thread(samples_of, port, "baton_local_prefill_total")
    return found[reason,]


@pytest.mark.parametrize(
    ("pp", "tp", "speculation"),
    mostly_long([(1, 1, ""), (2, 1, "draft"), (1, 2, ""), (1, 1, "draft")], kept=[(2, 1, "draft")]),
    ids=["alone", "stages with a draft", "ranks", "with a draft"],
)
async def test_one_worker_of_both_roles_gives_the_same_bits(
    checkpoint: Path, draft: Path, reference: Reference, pp: int, tp: int, speculation: str
) -> None:
    expected = on_the_wire(reference.answers(QUESTIONS))
    flags = ("--draft", str(draft), "--spec-topk", "2", "--spec-steps", "3") if speculation else ()
    async with running_cluster(
        checkpoint,
        prefill=0,
        decode=0,
        worker=1,
        worker_pp=pp,
        worker_tp=tp,
        worker_flags=flags,
    ) as running:
        await assert_answers(running, expected)
        leader = "worker-0" if pp == tp == 1 else "worker-0.0"
        assert await local_prefills(running, leader, "own_prompt") >= 2 * len(QUESTIONS)
        assert await local_prefills(running, leader, "in_place") == 0
        scored = replace(as_query(QUESTIONS[2]), num_prompt_logprobs=1)
        answer = await running.client.complete(scored, timeout_s=60)
        assert shown(answer) == expected[2]
        assert len(answer.prompt_logprobs) == len(QUESTIONS[2].prompt_token_ids) - 1
        assert await local_prefills(running, leader, "in_place") == 1
        await running.until_clean()


async def test_a_prompt_stays_in_its_data_rank_of_a_worker(
    checkpoint: Path, reference: Reference
) -> None:
    """Prompts with scores are prefilled for a decode pool, and this one is where they are already."""
    expected = on_the_wire(reference.answers(QUESTIONS))
    async with running_cluster(
        checkpoint, prefill=0, decode=0, worker=1, worker_tp=2, worker_dp_attention=2
    ) as running:
        answers = await asyncio.gather(
            *(
                running.client.complete(
                    replace(as_query(question), num_prompt_logprobs=1), timeout_s=60
                )
                for question in QUESTIONS
            )
        )
        assert [shown(each) for each in answers] == expected
        assert await local_prefills(running, "worker-0.0", "in_place") == len(QUESTIONS)
        status = await running.client.cluster_status()
        assert all(len(worker.data_ranks) == 2 for worker in status.workers)
        await running.until_clean()


@pytest.mark.parametrize("speculation", ["", "draft"])
async def test_pools_of_one_and_of_both_roles_serve_together(
    checkpoint: Path, draft: Path, reference: Reference, speculation: str
) -> None:
    """Prompts go from workers of both roles to decode pools, and from prefill pools to them."""
    questions = make_questions(24, seed=5, max_prompt=250, max_tokens=40)
    expected = on_the_wire(reference.answers(questions))
    async with running_cluster(
        checkpoint,
        worker=1,
        router_flags=("--policy", "round_robin"),
        worker_flags=("--draft", str(draft)) if speculation else (),
    ) as running:
        answers = await complete(running, questions)
        assert [shown(each) for each in answers] == expected
        placed = await asyncio.to_thread(
            samples_of, await running.metrics_port("router"), "baton_placements_total"
        )
        assert placed["aggregated", "no_handoff"] + placed["disaggregated", "streams"] > 0
        assert placed["disaggregated", "roles"] > 0
        status = await running.until_clean()
        assert {(each.kind, each.why): each.requests for each in status.placements} == {
            key: count for key, count in placed.items() if count
        }


async def busy_worker(running: RunningCluster) -> str:
    """Return the name of a worker that decodes, as soon as there is one."""
    status = await running.until(
        lambda now: any(each.role == "decode" and each.running_requests for each in now.workers),
        "a worker decodes",
    )
    (address, *_) = (
        each.address for each in status.workers if each.role == "decode" and each.running_requests
    )
    names = ("worker-0", "worker-1")
    return next(name for name in names if address_of(running, name) == address)


async def test_a_killed_worker_s_requests_go_on_at_the_other(
    checkpoint: Path, reference: Reference
) -> None:
    questions = [
        replace(question, max_tokens=400)
        for question in make_questions(16, seed=11, max_prompt=100, max_tokens=1)
    ]
    expected = on_the_wire(reference.answers(questions))
    async with running_cluster(checkpoint, prefill=0, decode=0, worker=2) as running:
        under_way = asyncio.create_task(complete(running, questions))
        name = await busy_worker(running)
        running.cluster.processes[name].kill()
        assert [shown(each) for each in await under_way] == expected
        assert (await migrations(running))[LOST] > 0
        await running.cluster.wait_serving(timeout_s=60)
        await running.until_clean()
        assert [shown(each) for each in await complete(running, questions)] == expected


def has_roles(wanted: set[tuple[str, str]], status: ClusterStatus) -> bool:
    """Return whether the workers serve these roles: pairs of an address and its roles."""
    serving = {
        (worker.address, worker.role): worker.serving and not worker.reason
        for worker in status.workers
    }
    return all(
        serving[address, role] is (role in roles.split(","))
        for address, roles in wanted
        for role in ("prefill", "decode")
    )


async def assert_shows(running: RunningCluster, name: str, roles: Sequence[str]) -> None:
    """Check the metrics and the health of a worker that serves these roles."""
    port = await running.metrics_port(name)
    assert await asyncio.to_thread(samples_of, port, "baton_pool_roles") == {
        (role,): float(role in roles) for role in ("prefill", "decode")
    }
    async with open_channel(address_of(running, name)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service, serves in (
            ("Prefill", "prefill" in roles),
            ("Decode", "decode" in roles),
            ("Worker", True),
        ):
            answer = await health.Check(  # type: ignore[attr-defined]  # stubs lack it
                health_pb2.HealthCheckRequest(service=f"baton.v1.{service}")
            )
            assert (answer.status == health_pb2.HealthCheckResponse.SERVING) is serves, service


async def test_roles_are_switched_under_load(checkpoint: Path, reference: Reference) -> None:
    """Every few requests another layout: no request fails, waits long, or differs in a bit."""
    questions = make_questions(12, seed=17, max_prompt=200, max_tokens=60)
    expected = on_the_wire(reference.answers(questions))
    both, layouts = (
        "prefill,decode",
        [
            ("prefill", "decode"),
            ("prefill,decode", "decode"),
            ("decode", "prefill"),
            ("prefill,decode", "prefill,decode"),
        ],
    )
    async with running_cluster(checkpoint, prefill=0, decode=0, worker=2) as running:
        addresses = [address_of(running, name) for name in ("worker-0", "worker-1")]
        for layout in layouts:
            under_way = asyncio.create_task(complete(running, questions))
            await asyncio.sleep(0.05)
            # The roles that are added come first, so that there is always a pair.
            for added in (True, False):
                for address, roles in zip(addresses, layout, strict=True):
                    wanted = both if added else roles
                    await set_roles(address, wanted.split(","), PLAIN_CHANNEL)
            assert [shown(each) for each in await under_way] == expected
            serving = set(zip(addresses, layout, strict=True))
            await running.until(partial(has_roles, serving), f"the roles {layout}")
            for name, roles in zip(("worker-0", "worker-1"), layout, strict=True):
                await assert_shows(running, name, roles.split(","))
            assert [shown(each) for each in await complete(running, questions)] == expected
        await running.until_clean()


LAYOUTS = [
    ("prefill", "decode", "prefill,decode"),
    ("decode", "prefill,decode", "prefill"),
    ("prefill,decode", "prefill", "decode"),
    ("decode", "prefill", "prefill,decode"),
]


@pytest.mark.long
async def test_workers_are_killed_while_roles_are_switched(
    checkpoint: Path, reference: Reference
) -> None:
    """Nothing is lost, wrong or leaked; a killed worker comes back with both roles."""
    questions = make_questions(12, seed=23, max_prompt=200, max_tokens=80)
    expected = on_the_wire(reference.answers(questions))
    over = asyncio.Event()
    async with running_cluster(checkpoint, prefill=0, decode=0, worker=3) as running:
        names = ["worker-0", "worker-1", "worker-2"]
        addresses = [address_of(running, name) for name in names]
        answers: list[asyncio.Task[bool]] = []

        async def asked(index: int) -> bool:
            which = index % len(questions)
            query = replace(as_query(questions[which]), request_id=f"r{index}")
            return shown(await running.client.complete(query, timeout_s=60)) == expected[which]

        async def steadily() -> None:
            while not over.is_set():
                answers.append(asyncio.create_task(asked(len(answers))))
                await asyncio.sleep(0.1)

        async def switch(layout: Sequence[str]) -> None:
            """Switch the workers that are there, one after the other."""
            for address, roles in zip(addresses, layout, strict=True):
                with suppress(UnavailableError):
                    await set_roles(address, roles.split(","), PLAIN_CHANNEL)

        load = asyncio.create_task(steadily())
        for turn in range(8):
            await switch(LAYOUTS[turn % len(LAYOUTS)])
            await asyncio.sleep(1.0)
            running.cluster.processes[names[turn % len(names)]].kill()
            await asyncio.sleep(1.5)
            await running.cluster.wait_serving(timeout_s=60)
        over.set()
        await load
        assert all(await asyncio.gather(*answers))
        assert len(answers) > 100
        await switch(["prefill,decode"] * 3)
        await running.until_clean()


@pytest.mark.long
async def test_a_worker_of_both_roles_takes_half_of_a_pair_s_memory(tmp_path: Path) -> None:
    """In the smallest published shape, with the same memory for the cache of each pool."""
    model = write_published(tmp_path / "model", "Qwen3Config", QWEN3_0_6B, has_weights=True)
    taken = {}
    for name, count in (("pair", 0), ("one", 1)):
        flags = ("--memory-mb", "256", "--max-context", "1024")
        async with running_cluster(
            model, prefill=1 - count, decode=1 - count, worker=count, worker_flags=flags
        ) as running:
            query = Query(
                tuple(range(3, 400)),
                Sampling(temperature=0),
                Stop(max_tokens=8, ignore_eos=True),
                skip_text=True,
            )
            await running.client.complete(query, timeout_s=60)
            await running.until_clean()
            sizes = running.resident_bytes()
        taken[name] = sum(size for process, size in sizes.items() if process != "router")
    assert taken["one"] <= 0.55 * taken["pair"], taken
