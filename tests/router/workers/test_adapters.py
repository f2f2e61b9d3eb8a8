"""What routers know of their workers' adapters, and the workers that they prefer for one."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from protos import adapters_pb2 as pb
from protos import worker_pb2
from router.api.adapters import AdaptersService
from router.workers.adapters import offered_adapters
from router.workers.placement_request import PlacementRequest
from router.workers.prefix_index import RoutedPrompt
from tests.router.workers.test_directory import Known, serves


class Has(NamedTuple):
    """The adapters of a worker, as it reports them."""

    offered: Sequence[str] = ()
    retired: Sequence[str] = ()


@pytest.mark.parametrize(
    ("prefill", "decode", "more", "expected"),
    [
        (Has(), Has(), Has(), {}),
        (Has(["b@1", "a@1"]), Has(["a@1"]), Has(), {"a": "a@1", "b": "b@1"}),
        # versions: the one that both roles accept, then the one that more workers offer
        (Has(["a@2"], ["a@1"]), Has(["a@1"]), Has(["a@1"]), {"a": "a@1"}),
        (Has(["a@2"], ["a@1"]), Has(["a@2"], ["a@1"]), Has(["a@1"]), {"a": "a@2"}),
        (Has(["a@2"]), Has(["a@2"]), Has(["a@1"]), {"a": "a@2"}),
        (Has(["a@1"]), Has(["a@2"]), Has(["a@2"]), {"a": "a@2"}),
        # what all have retired is offered to no new request
        (Has([], ["a@1"]), Has([], ["a@1"]), Has(), {}),
        (Has([], ["a@1"]), Has(["a@1"]), Has(), {"a": "a@1"}),
    ],
)
async def test_offered_versions(
    prefill: Has, decode: Has, more: Has, expected: dict[str, str]
) -> None:
    known = Known(2)
    for worker, has in zip(known.directory.workers, (prefill, decode, more), strict=True):
        serves(worker, adapters=[*has.offered, *has.retired], retired_adapters=has.retired)
    assert offered_adapters(known.directory.workers) == expected
    assert known.directory.facts.adapters == expected


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
    answer = await AdaptersService(known.directory).ListAdapters(pb.ListAdaptersRequest(), None)  # type: ignore[arg-type]
    assert [worker.address for worker in answer.workers] == [
        worker.address for worker in known.directory.workers
    ]
    assert [worker.role for worker in answer.workers] == ["prefill", "decode", "decode"]
    assert all(worker.error for worker in answer.workers)
