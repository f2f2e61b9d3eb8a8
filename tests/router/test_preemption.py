"""Less urgent requests pause for more urgent ones; their streams go on with the same tokens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import pytest

from protos import types_pb2
from router.request.flow import RequestFlow
from runtime.errors import BatonError, DeadlineError, PeerLostError
from tests.router.harness import (
    ADMISSION_LIMITS,
    FLOW_LIMITS,
    RouterHarness,
    eventually,
    running_router,
    token_request,
)
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    expected_tokens,
)

PROMPT = [1, 2, 3]
PLACES = 2
Asked: TypeAlias = "asyncio.Task[BatonError | int | None]"
PREEMPTED = {"type": "preempted", "outcome": "resumed"}


@dataclass
class Full:
    """A router with one decode pool of `PLACES` requests."""

    router: RouterHarness
    decode: FakeDecode

    async def ask(self, name: str, priority: int, tokens: int) -> BatonError | int | None:
        """Return the error or abort of a request, or None if its response is right."""
        request = token_request(PROMPT, max_tokens=tokens, request_id=name, priority=priority)
        try:
            answer = await self.router.ask(request)
        except BatonError as error:
            return error
        assert answer.finish is not None
        if answer.finish.reason == types_pb2.FINISH_REASON_ABORTED:
            return answer.finish.reason
        assert answer.token_ids == expected_tokens(PROMPT, tokens)
        return None

    def start(self, name: str, priority: int, tokens: int) -> Asked:
        return asyncio.create_task(self.ask(name, priority, tokens))

    async def running(self, name: str, priority: int, tokens: int = 60) -> Asked:
        """Start a request and wait until it generates."""
        task = self.start(name, priority, tokens)
        await eventually(lambda: self.is_decoding(name), f"{name} runs")
        return task

    def flow(self, name: str) -> RequestFlow | None:
        """Return the flow of a request that has not ended."""
        running = self.router.service._running.items()
        return next((flows[0] for key, flows in running if key.request_id == name), None)

    def is_decoding(self, name: str) -> bool:
        flow = self.flow(name)
        return flow is not None and flow.preemptible_on is not None

    def is_paused(self, name: str) -> bool:
        return name not in self.decode.open_requests and bool(self.num_paused)

    def limit(self, seconds: float) -> None:
        """Give later requests this time."""
        service = self.router.service
        service._limits = replace(service._limits, max_request_s=seconds)

    @property
    def num_paused(self) -> int:
        return len(self.router.services.admission.preemption._paused)

    @property
    def num_preempted(self) -> float:
        return self.router.metric("baton_migrations_total", **PREEMPTED)


@asynccontextmanager
async def full_pool(preempt_from: int = 1, places: int = PLACES) -> AsyncIterator[Full]:
    fabric, journal = Fabric(), Journal()
    prefill = FakePrefill("p", fabric, journal)
    decode = FakeDecode("d", fabric, journal, max_running=places)
    decode.token_pause_s = 0.02
    limits = replace(ADMISSION_LIMITS, preempt_from=preempt_from)
    flow = replace(FLOW_LIMITS, peer_wait_s=1.0)
    async with running_router(prefill, decode, admission=limits, flow=flow) as router:
        yield Full(router, decode)
        assert not router.services.admission.preemption._running
        assert not router.services.admission.preemption._paused
        await router.assert_nothing_left()


async def test_the_youngest_of_the_least_urgent_pauses_and_goes_on() -> None:
    async with full_pool(places=3) as full:
        batch = [await full.running("old 5", 5), await full.running("young 5", 5)]
        batch.append(await full.running("youngest 1", 1))
        urgent = full.start("urgent", 0, 10)
        await eventually(lambda: full.is_paused("young 5"), "the preemption")
        assert {"old 5", "youngest 1"} <= set(full.decode.open_requests)
        assert await asyncio.gather(urgent, *batch) == [None] * 4
        assert full.num_preempted == 1
        assert full.router.metric("baton_router_retries_total", role="decode") == 0


@pytest.mark.parametrize(
    ("preempt_from", "running", "waiting"), [(1, 0, -1), (1, 5, 5), (6, 5, 0), (101, 100, 0)]
)
async def test_who_may_not_be_preempted_is_waited_for(
    preempt_from: int, running: int, waiting: int
) -> None:
    async with full_pool(preempt_from) as full:
        first = [await full.running(f"running {index}", running) for index in range(PLACES)]
        assert await asyncio.gather(full.start("waiting", waiting, 2), *first) == [None] * 3
        assert full.num_preempted == 0


async def test_paused_requests_go_before_later_ones_and_after_urgent_ones() -> None:
    async with full_pool(places=1) as full:
        paused = await full.running("paused", 5)
        urgent = [full.start(f"urgent {index}", 0, 5) for index in range(3)]
        await eventually(lambda: full.is_paused("paused"), "the preemption")
        assert full.router.metric("baton_router_paused") == 1
        later = full.start("later", 5, 5)
        ended = []
        paused.add_done_callback(lambda _: ended.append("paused"))
        later.add_done_callback(lambda _: ended.append("later"))
        assert await asyncio.gather(*urgent) == [None] * 3
        assert ended == []
        assert [await paused, await later] == [None, None]
        assert ended == ["paused", "later"]
        assert full.router.metric("baton_router_paused") == 0
        assert full.num_preempted == 1


async def test_a_request_may_pause_again_but_makes_progress_each_time() -> None:
    async with full_pool(places=1) as full:
        batch = await full.running("batch", 3, 20)
        for index in range(4):
            assert await full.ask(f"urgent {index}", 0, 2) is None
            await eventually(lambda: full.is_decoding("batch"), "the resumption")
        assert await batch is None
        assert full.num_preempted == 4


async def test_a_paused_request_can_be_aborted_and_has_its_deadline() -> None:
    async with full_pool() as full:
        aborted = await full.running("aborted", 5, 1000)
        full.limit(3.0)
        late = await full.running("late", 5, 1000)
        full.limit(60.0)
        urgent = [full.start(f"urgent {index}", 0, 200) for index in range(PLACES)]
        await eventually(lambda: full.num_paused == PLACES, "both pause")
        flow = full.flow("aborted")
        assert flow is not None
        flow.abort()
        assert await aborted == types_pb2.FINISH_REASON_ABORTED
        assert isinstance(await late, DeadlineError)
        assert await asyncio.gather(*urgent) == [None] * PLACES


async def test_a_paused_request_whose_workers_are_gone_ends_with_their_loss() -> None:
    async with full_pool(places=1) as full:
        batch = await full.running("batch", 5)
        urgent = full.start("urgent", 0, 1000)
        await eventually(lambda: full.is_paused("batch"), "the preemption")
        await full.decode.die()
        assert isinstance(await batch, PeerLostError)
        assert isinstance(await urgent, PeerLostError)
