"""Time that jumps."""

import asyncio
import time

import pytest

from runtime.clock import LoopClock
from runtime.errors import InternalError
from sim.time import run_virtually


def test_an_hour_passes_without_waiting() -> None:
    async def wait() -> list[float]:
        loop, seen = asyncio.get_running_loop(), []
        async with asyncio.TaskGroup() as group:
            for pause_s in (3600.0, 0.5, 60.0):
                task = group.create_task(asyncio.sleep(pause_s))
                task.add_done_callback(lambda _: seen.append(LoopClock(loop).now()))
        return seen

    began = time.monotonic()
    assert run_virtually(wait()) == [0.5, 60.0, 3600.0]
    assert time.monotonic() - began < 1800


def test_deadlines_are_virtual_too() -> None:
    async def give_up() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(give_up()) == 30


def test_waiting_for_an_event_that_never_happens_is_an_error() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(InternalError, match="never happen"):
        run_virtually(wait())
