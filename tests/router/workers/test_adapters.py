"""What routers know of their workers' adapters, and the workers that they prefer for one."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, cast

import pytest
from prometheus_client import CollectorRegistry

from protos import adapters_pb2 as pb
from protos import types_pb2, worker_pb2
from router.api.adapters import AdaptersService, Context
from router.request.admission import Admission
from router.request.rejections import AdmissionLimits
from router.request.service_times import ServiceTimeModel
from router.request.validate import AdmissibleRequest
from router.text.model_facts import ServedAdapters
from router.workers.adapters import served_adapters
from router.workers.placement_request import PlacementRequest
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import WorkerRole
from runtime.clock import Deadline, LoopClock
from runtime.errors import UnavailableError, UnknownModelError
from runtime.observe.metrics.router import RouterMetrics
from tests.router.workers.test_directory import Known, serves


class Has(NamedTuple):
    """The adapters of a worker, as it reports them."""

    offered: Sequence[str] = ()
    retired: Sequence[str] = ()


@pytest.mark.parametrize(
    ("prefill", "decode", "more", "expected"),
    [
        (Has(), Has(), Has(), ServedAdapters()),
        (
            Has(["b@1", "a@1"]),
            Has(["a@1", "b@1"]),
            Has(),
            ServedAdapters({"a": "a@1", "b": "b@1"}),
        ),
        (Has(["b@1", "a@1"]), Has(["a@1"]), Has(), ServedAdapters({"a": "a@1"})),
        # versions: the one that both roles accept, then the one that more workers offer
        (Has(["a@2"], ["a@1"]), Has(["a@1"]), Has(["a@1"]), ServedAdapters({"a": "a@1"})),
        (
            Has(["a@2"], ["a@1"]),
            Has(["a@2"], ["a@1"]),
            Has(["a@1"]),
            ServedAdapters({"a": "a@2"}, {"a": ("a@1",)}),
        ),
        (Has(["a@1"]), Has(["a@2"]), Has(["a@1"]), ServedAdapters({"a": "a@1"})),
        (Has(["a@1"]), Has(["a@2"]), Has(["a@2"]), ServedAdapters(differing=frozenset("a"))),
        # responses that have begun go on with what all have retired
        (Has([], ["a@1"]), Has([], ["a@1"]), Has(), ServedAdapters(former={"a": ("a@1",)})),
        (Has([], ["a@1"]), Has(["a@1"]), Has(), ServedAdapters({"a": "a@1"})),
    ],
)
async def test_versions_of_adapters(
    prefill: Has, decode: Has, more: Has, expected: ServedAdapters
) -> None:
    known = Known(2)
    for worker, has in zip(known.directory.workers, (prefill, decode, more), strict=True):
        serves(worker, adapters=[*has.offered, *has.retired], retired_adapters=has.retired)
    assert served_adapters(known.directory.workers) == expected
    assert known.directory.facts.adapters == expected


async def test_a_router_that_knows_no_pair_yet_refuses_no_adapter() -> None:
    """It may have started a moment ago."""
    known = Known(1)
    facts = known.directory.facts
    for name in ("a", "tiny:a"):
        with pytest.raises(UnavailableError, match="have reported yet whether they have 'a'"):
            facts.adapters_of(name)
    with pytest.raises(UnknownModelError):
        facts.adapters_of("other:a")
    serves(known.prefill, adapters=["a@1"])
    with pytest.raises(UnavailableError, match="have reported yet"):
        known.directory.facts.adapters_of("a")
    serves(known.decode[0], adapters=["a@2"])
    with pytest.raises(UnavailableError, match="not the same version"):
        known.directory.facts.adapters_of("a")
    serves(known.decode[0])
    with pytest.raises(UnknownModelError):
        known.directory.facts.adapters_of("a")


async def test_a_worker_with_the_adapter_in_memory_goes_first() -> None:
    known = Known(3)
    serves(known.prefill, adapters=["a"])
    for pool, loaded in zip(known.decode, ([], ["a"], []), strict=True):
        serves(pool, adapters=["a"], loaded_adapters=loaded)
    request = PlacementRequest(RoutedPrompt([1, 2, 3], adapter="a"), 8)
    for pool_is_full, expected in ((False, {1}), (True, {0, 2})):
        if pool_is_full:
            known.decode[1].reported(worker_pb2.WorkerLoad(serving=True))
        found = set()
        for _ in range(16):
            pair = known.directory.placement.place(request)
            assert pair is not None
            found.add(known.decode.index(pair.decode.worker))
            pair.release()
        assert found == expected


async def test_workers_that_do_not_answer_are_part_of_the_answer() -> None:
    known = Known(2)
    answer = await AdaptersService(known.directory).ListAdapters(
        pb.ListAdaptersRequest(), cast(Context, None)
    )
    assert [worker.address for worker in answer.workers] == [
        worker.address for worker in known.directory.workers
    ]
    assert [worker.role for worker in answer.workers] == ["prefill", "decode", "decode"]
    assert all(worker.error for worker in answer.workers)


def wanting(adapter: str) -> AdmissibleRequest:
    engine = types_pb2.EngineRequest(prompt_token_ids=[1, 2, 3], max_tokens=5, adapter=adapter)
    return AdmissibleRequest(engine, (), wants_text=False)


def admission_of(known: Known) -> Admission:
    return Admission(
        known.directory,
        AdmissionLimits(),
        RouterMetrics.create(CollectorRegistry()),
        ServiceTimeModel(LoopClock()),
    )


async def test_a_request_whose_workers_are_full_delays_no_other() -> None:
    known = Known(2)
    for worker, has in zip(known.directory.workers, (["a"], ["a"], []), strict=True):
        serves(worker, adapters=has)
    known.decode[0].reported(worker_pb2.WorkerLoad(serving=True))  # full
    admission = admission_of(known)
    running = asyncio.create_task(admission.run())
    deadline = Deadline.after(LoopClock(), 30)
    first = asyncio.create_task(admission.wait(admission.arrive(wanting("a"), deadline)))
    await asyncio.sleep(0.01)
    placed = await admission.wait(admission.arrive(wanting(""), deadline))
    assert placed.pair.decode.worker is known.decode[1]
    assert not first.done()
    known.decode[0].reported(worker_pb2.WorkerLoad(serving=True, pages_free=10, slots_free=4))
    async with asyncio.timeout(5):
        assert (await first).pair.decode.worker is known.decode[0]
    running.cancel()


async def test_a_request_without_a_worker_for_its_adapter_ends_at_once() -> None:
    known = Known(1)
    serves(known.prefill, adapters=["a@1"])
    serves(known.decode[0])
    admission = admission_of(known)
    with pytest.raises(UnavailableError, match="no available worker has the adapter 'a' in this"):
        admission.arrive(wanting("a@1"), Deadline.after(LoopClock(), 30))
    assert known.directory.knows_adapter(WorkerRole.PREFILL, "a@1")
    assert not known.directory.knows_adapter(WorkerRole.DECODE, "a@1")
