"""Placement on workers of both roles: requests are decoded together, where there is room."""

import random

import pytest
from prometheus_client import CollectorRegistry

from protos import worker_pb2
from router.workers.directory import Directory, DirectoryOptions
from router.workers.placement_request import PlacementRequest
from router.workers.policy import Policy
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import WorkerRole
from runtime.observe.metrics.router import RouterMetrics
from tests.router.harness import FACTS, worker_info

BOTH = ("127.0.0.1:1", "127.0.0.1:2")


class Fleet:
    """Workers of both roles, and a decode pool."""

    def __init__(self, decode: tuple[str, ...] = ()) -> None:
        self.registry = CollectorRegistry()
        self.directory = Directory(
            DirectoryOptions(BOTH, (*BOTH, *decode), Policy.LEAST_LOAD),
            FACTS,
            RouterMetrics.create(self.registry),
            random.Random(0),
        )
        for worker in self.directory.workers:
            worker.introduced(
                worker_info(
                    worker.role,
                    incarnation=worker.address,
                    roles=["prefill", "decode"],
                    pages_total=100,
                    max_running_requests=8,
                    slots_total=0,
                ),
                FACTS,
            )
            self.load(worker.address, worker.role)

    def load(
        self, address: str, role: WorkerRole, running: int = 0, queued_tokens: int = 0
    ) -> None:
        for worker in self.directory.workers:
            if (worker.address, worker.role) == (address, role):
                worker.reported(
                    worker_pb2.WorkerLoad(
                        serving=True,
                        pages_free=100,
                        running_requests=running,
                        queued_tokens=queued_tokens,
                    )
                )

    def place(self) -> tuple[str, str]:
        """Return the addresses of the prefill and the decode worker."""
        pair = self.directory.placement.place(PlacementRequest(RoutedPrompt([1, 2, 3])))
        assert pair is not None
        addresses = pair.prefill.address, pair.decode.address
        assert pair.is_aggregated is (addresses[0] == addresses[1])
        assert pair.kind == ("aggregated" if pair.is_aggregated else "disaggregated")
        pair.release()
        return addresses

    def count(self, kind: str, why: str) -> float | None:
        return self.registry.get_sample_value("baton_placements_total", {"kind": kind, "why": why})


async def test_the_worker_that_prefills_also_decodes() -> None:
    fleet = Fleet()
    for _ in range(20):
        source, pool = fleet.place()
        assert source == pool
    assert fleet.count("aggregated", "no_handoff") == 20


async def test_requests_are_decoded_together() -> None:
    """The worker without requests prefills at full speed, the other one goes on to decode."""
    fleet = Fleet()
    fleet.load(BOTH[1], WorkerRole.DECODE, running=2)
    for _ in range(5):
        assert fleet.place() == (BOTH[0], BOTH[1])
    assert fleet.count("disaggregated", "streams") == 5


async def test_a_prompt_stays_where_others_are_decoded() -> None:
    """The other worker has prompts for longer than four times the prompt."""
    fleet = Fleet()
    fleet.load(BOTH[0], WorkerRole.DECODE, running=2)
    fleet.load(BOTH[1], WorkerRole.PREFILL, queued_tokens=1000)
    assert fleet.place() == (BOTH[0], BOTH[0])
    assert fleet.count("aggregated", "no_handoff") == 1


@pytest.mark.parametrize(
    ("running", "decodes"),
    [((4, 0), BOTH[0]), ((5, 0), BOTH[1]), ((3, 4), BOTH[1]), ((4, 3), BOTH[0])],
)
async def test_a_worker_with_room_decodes(running: tuple[int, int], decodes: str) -> None:
    """Of eight requests: up to four the worker has room, and the busier of two such decodes."""
    fleet = Fleet()
    for address, count in zip(BOTH, running, strict=True):
        fleet.load(address, WorkerRole.DECODE, running=count)
    idle = BOTH[running.index(0)] if 0 in running else ""
    source, pool = fleet.place()
    assert source == idle or not idle
    assert pool == (source if running == (5, 0) or not idle else decodes)


async def test_busy_workers_decode_as_the_policy_says() -> None:
    fleet = Fleet()
    fleet.load(BOTH[0], WorkerRole.DECODE, running=7)
    fleet.load(BOTH[1], WorkerRole.DECODE, running=6)
    fleet.load(BOTH[1], WorkerRole.PREFILL, queued_tokens=1000)
    assert fleet.place() == BOTH
    assert fleet.count("disaggregated", "load") == 1


async def test_a_slow_handoff_is_avoided() -> None:
    """Each token of a handoff takes half as long as a response."""
    fleet = Fleet()
    fleet.load(BOTH[1], WorkerRole.DECODE, running=2)
    (pool,) = [
        worker
        for worker in fleet.directory.workers
        if (worker.address, worker.role) == (BOTH[1], WorkerRole.DECODE)
    ]
    pool.answer_pace.answered(1.0)
    pool.answer_pace.record_handoff(1000, 500.0)
    assert fleet.place() == (BOTH[0], BOTH[0])
    assert fleet.count("aggregated", "handoff") == 1


async def test_a_lost_source_is_replaced_on_another_worker_if_there_is_one() -> None:
    """A prompt is not handed over within a worker: that request would have to start over."""
    fleet, request = Fleet(), PlacementRequest(RoutedPrompt((1,) * 100))
    fleet.load(BOTH[1], WorkerRole.PREFILL, queued_tokens=10_000)
    (pool,) = (
        worker
        for worker in fleet.directory.workers
        if (worker.address, worker.role) == (BOTH[0], WorkerRole.DECODE)
    )
    found = fleet.directory.placement.book_prefill(request, pool.book(1), frozenset())
    assert found is not None
    assert found.worker.address == BOTH[1], "although the other one is idle"


async def test_a_worker_that_does_not_decode_now_hands_the_prompt_over() -> None:
    fleet = Fleet(decode=("127.0.0.1:3",))
    for worker in fleet.directory.workers:
        if worker.address in BOTH and worker.role is WorkerRole.DECODE:
            worker.reported(
                worker_pb2.WorkerLoad(serving=False, reason="it was switched to prefill")
            )
    source, pool = fleet.place()
    assert source in BOTH
    assert pool == "127.0.0.1:3"
    assert fleet.count("disaggregated", "roles") == 1


def test_a_worker_serves_only_its_roles() -> None:
    both = worker_info(WorkerRole.PREFILL, roles=["prefill", "decode"])
    assert not FACTS.mismatch(both, "decode")
    assert not FACTS.mismatch(both, "prefill")
    old = worker_info(WorkerRole.PREFILL)  # of a worker that names one role only
    assert FACTS.mismatch(old, "decode") == "it is a prefill worker, configured as decode"
