"""Placement on workers of both roles: one worker for both parts of a request, unless it is much
busier than another."""

import random

import pytest
from prometheus_client import CollectorRegistry

from protos import worker_pb2
from router.workers.directory import Directory, DirectoryOptions
from router.workers.placement_request import PlacementRequest
from router.workers.policy import Policy
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import WorkerRole
from runtime.observe.metrics import RouterMetrics
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


@pytest.mark.parametrize(("running", "goes_elsewhere"), [(2, False), (3, True)])
async def test_a_much_busier_worker_hands_the_prompt_over(
    running: int,
    goes_elsewhere: bool,  # noqa: FBT001 - what is expected
) -> None:
    """Of eight requests two are a quarter, and three more."""
    fleet = Fleet()
    fleet.load(BOTH[0], WorkerRole.DECODE, running=running)
    fleet.load(BOTH[1], WorkerRole.PREFILL, queued_tokens=1000)
    assert fleet.place() == (BOTH[0], BOTH[1] if goes_elsewhere else BOTH[0])
    assert fleet.count("disaggregated", "load") == goes_elsewhere


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
