"""Capacity that less urgent requests leave free."""

import asyncio
from dataclasses import replace

import pytest

from router.request.holdback import Holdback
from runtime.errors import ConfigError
from tests.router.harness import ADMISSION_LIMITS, eventually, running_router, token_request
from tests.support.router.fake_workers import Fabric, FakeDecode, FakePrefill, Journal


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (["urgent=0.5"], "PRIORITY=SHARE"),
        (["1=0"], "a share above 0"),
        (["1=1.5"], "at most 1"),
        (["1=nan"], "at most 1"),
        (["101=0.5"], "from -100 to 100"),
        (["1=0.5", "5=0.8"], "a less urgent priority must not have a higher share"),
    ],
)
def test_invalid_ceilings_are_refused(entries: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Holdback.parse(entries)


async def test_urgent_requests_find_a_place_and_others_wait_for_theirs() -> None:
    """A pool of four: priority 1 may use half of it, priority 5 a quarter. Nothing is lost."""
    fabric, journal = Fabric(), Journal()
    prefill = FakePrefill("p", fabric, journal)
    decode = FakeDecode("d", fabric, journal, max_running=4)
    decode.token_pause_s = 0.05
    limits = replace(ADMISSION_LIMITS, holdback=Holdback.parse(["1=0.5", "5=0.25"]))
    async with running_router(prefill, decode, admission=limits) as router:

        async def ask(name: str, priority: int, tokens: int) -> int:
            request = token_request([1, 2, 3], max_tokens=tokens, request_id=name)
            request.priority = priority
            return len((await router.ask(request)).token_ids)

        async def started(name: str, priority: int, tokens: int = 40) -> "asyncio.Task[int]":
            task = asyncio.create_task(ask(name, priority, tokens))
            await eventually(lambda: name in decode.open_requests, f"{name} runs")
            return task

        running = [await started("batch 1", 1), await started("batch 2", 1)]
        waiting = [
            asyncio.create_task(ask(name, priority, 2))
            for name, priority in (("batch 3", 1), ("idle", 5))
        ]
        await eventually(lambda: router.services.admission.num_waiting == 2, "two wait")
        running += [await started("urgent 1", 0), await started("urgent 2", 0)]
        assert router.services.admission.num_waiting == 2
        assert len(decode.open_requests) == 4
        assert await asyncio.gather(*running, *waiting) == [40, 40, 40, 40, 2, 2]
