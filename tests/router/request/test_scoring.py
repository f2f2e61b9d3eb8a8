"""Places for prompts with logprobs, of which each client has a part."""

import asyncio

import pytest

from router.request.scoring import SHARE, ScoringPlaces
from runtime.errors import CapacityError


class Held:
    """Requests that keep their places until released."""

    def __init__(self, num_places: int, max_wait_s: float = 60.0) -> None:
        self.num_places = num_places
        self.places = ScoringPlaces(lambda: self.num_places, max_wait_s)
        self.order: list[str] = []
        self.may_go: dict[str, asyncio.Event] = {}

    async def hold(self, name: str) -> None:
        self.may_go[name] = asyncio.Event()
        async with self.places.taken(name[0]):
            self.order.append(name)
            await self.may_go[name].wait()


async def test_each_client_has_its_part_and_its_requests_wait_in_order() -> None:
    held = Held(2 * SHARE)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        tasks = {
            name: group.create_task(held.hold(name)) for name in ("a1", "a2", "a3", "a4", "b1")
        }
        await asyncio.sleep(0)
        assert held.order == ["a1", "a2", "b1"]
        tasks["a3"].cancel()
        held.may_go["a2"].set()
        await asyncio.wait({tasks["a2"]})
        await asyncio.sleep(0)
        assert held.order == ["a1", "a2", "b1", "a4"]
        for event in held.may_go.values():
            event.set()
    assert not held.places._taken
    assert not held.places._waiting


async def test_places_shrink_with_lost_workers_to_one_at_least() -> None:
    held = Held(2 * SHARE, max_wait_s=0.05)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        first, second = (group.create_task(held.hold(name)) for name in ("a1", "a2"))
        await asyncio.sleep(0)
        held.num_places = 0
        held.may_go["a1"].set()
        await asyncio.wait({first})
        with pytest.raises(
            CapacityError, match="1 prompts with logprobs of this client are in progress"
        ):
            await held.hold("a3")
        held.may_go["a2"].set()
        await asyncio.wait({second})
        held.may_go["a4"] = asyncio.Event()
        last = group.create_task(held.hold("a4"))
        await asyncio.sleep(0)
        assert held.order == ["a1", "a2", "a4"]
        held.may_go["a4"].set()
        await asyncio.wait({last})
