"""One worker under several addresses is one worker."""

import logging
import random

import pytest
from prometheus_client import CollectorRegistry

from protos import generation_pb2, worker_pb2
from router.workers.directory import Directory, DirectoryOptions
from router.workers.placement_request import PlacementRequest
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import Worker, WorkerRole
from runtime.observe.metrics.router import RouterMetrics
from tests.router.harness import FACTS, eventually, running_router, token_request, worker_info
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    expected_tokens,
)

PROMPT = RoutedPrompt(tuple(range(3, 23)))


class Known:
    """A directory with one prefill worker and a decode pool under two addresses, IPv4 and IPv6."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.directory = Directory(
            DirectoryOptions(("10.0.0.1:7000",), ("10.0.0.2:7000", "[fd00::2]:7000")),
            FACTS,
            RouterMetrics.create(self.registry),
            random.Random(0),
        )
        self.prefill, self.four, self.six = self.directory.workers
        serves(self.prefill, "of the prefill worker")

    @property
    def counted(self) -> tuple[float | None, float | None]:
        """Return the numbers of usable and other decode pools, as in metrics."""
        usable, unusable = (
            self.registry.get_sample_value(
                "baton_router_workers", {"role": "decode", "state": state}
            )
            for state in ("usable", "unusable")
        )
        return usable, unusable

    @property
    def shown(self) -> list[str]:
        """Return the addresses of decode pools in the status."""
        return [
            status.address for status in self.directory.status() if status.role == WorkerRole.DECODE
        ]


def serves(worker: Worker, incarnation: str) -> None:
    worker.introduced(
        worker_info(worker.role, incarnation=incarnation, max_queued_requests=100), FACTS
    )
    worker.reported(worker_pb2.WorkerLoad(serving=True, pages_free=10, slots_free=4))


async def test_two_addresses_of_one_worker_count_once_with_one_line_of_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = Known()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            serves(known.four, "one")
            serves(known.six, "one")
    assert known.shown == ["10.0.0.2:7000"]
    assert known.counted == (1, 0)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "two addresses are one decode worker, which counts once: 10.0.0.2:7000 and [fd00::2]:7000"
    ]


async def test_the_capacity_of_one_worker_is_used_once() -> None:
    known = Known()
    serves(known.four, "one")
    serves(known.six, "one")
    with_one_address = Known()
    serves(with_one_address.four, "one")
    expected, pairs = (
        [directory.placement.place(PlacementRequest(PROMPT)) for _ in range(8)]
        for directory in (with_one_address.directory, known.directory)
    )
    assert [pair is not None for pair in pairs] == [pair is not None for pair in expected]
    assert {pair.decode.worker.address for pair in pairs if pair is not None} == {"10.0.0.2:7000"}


async def test_the_other_address_replaces_a_failed_one_and_stays_in_use() -> None:
    known = Known()
    serves(known.four, "one")
    serves(known.six, "one")
    known.four.lost("cannot be reached")
    assert known.shown == ["[fd00::2]:7000"]
    assert known.counted == (1, 0)
    assert known.directory.is_paired
    serves(known.four, "one")
    assert known.shown == ["[fd00::2]:7000"]
    known.six.lost("cannot be reached")
    known.four.lost("cannot be reached")
    assert known.counted == (0, 1)
    assert not known.directory.is_paired


async def test_addresses_that_turn_out_to_be_two_workers_are_two_again() -> None:
    known = Known()
    serves(known.four, "one")
    serves(known.six, "one")
    serves(known.four, "another")
    assert known.shown == ["10.0.0.2:7000", "[fd00::2]:7000"]
    assert known.counted == (2, 0)


async def test_a_worker_named_twice_serves_and_is_shown_once() -> None:
    fabric, journal = Fabric(), Journal()
    prefill, decode = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    async with running_router(prefill, decode) as plain:
        port = decode.address.rpartition(":")[2]
        twice = FakeDecode("d", fabric, journal)
        twice.address = f"localhost:{port}"
        async with running_router(prefill, decode, twice, start_workers=False) as router:
            workers = router.directory.workers
            await eventually(
                lambda: (
                    len(router.directory.workers) == 2
                    and all(worker.is_usable for worker in router.directory.workers)
                ),
                f"not two that serve: {workers}",
            )
            answer = await router.ask(token_request([3, 4, 5]))
            assert answer.token_ids == expected_tokens([3, 4, 5], 4)
            status = await router.stub.GetClusterStatus(generation_pb2.GetClusterStatusRequest())
            assert [worker.role for worker in status.workers] == ["prefill", "decode"]
            assert all(worker.serving and not worker.reason for worker in status.workers)
        assert len(plain.directory.workers) == 2
