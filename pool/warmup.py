"""One request from inside, through all stages of the pool, before anybody is told that it serves."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from engine.loop import EngineLoop
from runtime.errors import BatonError, DeadlineError

EventT = TypeVar("EventT")

WARM_UP_TIMEOUT_S = 60.0


async def run_inside(loop: EngineLoop, submit: Callable[[Callable[[EventT], object]], int],
                     outcome: Callable[[EventT], bool | BatonError]) -> int:
    """Submit a request on the loop's thread and wait for the event whose `outcome` is not False; returns its key,
    which the caller releases.

    Raises:
        BatonError: the outcome was one.
        DeadlineError: there was none in time.
    """
    events = asyncio.get_running_loop()
    done: asyncio.Future[None] = events.create_future()

    def settle(event: EventT) -> None:
        result = outcome(event)
        if done.done() or result is False:
            return
        if isinstance(result, BatonError):
            done.set_exception(result)
        else:
            done.set_result(None)

    key = await loop.submit(lambda: submit(lambda event: events.call_soon_threadsafe(settle, event)))
    try:
        async with asyncio.timeout(WARM_UP_TIMEOUT_S):
            await done
    except TimeoutError:
        raise DeadlineError(f"the warm-up token did not come within {WARM_UP_TIMEOUT_S:g} s") from None
    return key
