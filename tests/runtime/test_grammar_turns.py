"""Clients that share a compiler, by the order in which they get to it."""

import asyncio

import pytest

from runtime.errors import CapacityError
from runtime.grammar import turns
from runtime.grammar.turns import BURST, Allowances, Turns
from tests.router.harness import eventually


class Compiler:
    """A compiler that records whose turn it is; compilations end on command."""

    def __init__(self, at_once: int, max_waiting: int = 100) -> None:
        self.turns = Turns(at_once, max_waiting)
        self.order: list[str] = []
        self.may_end = asyncio.Semaphore(0)
        self.tasks: list[asyncio.Task[None]] = []

    async def compile(self, client: str) -> None:
        async with self.turns.taken(client):
            self.order.append(client)
            await self.may_end.acquire()

    async def bring(self, *clients: str) -> None:
        for client in clients:
            self.tasks.append(asyncio.create_task(self.compile(client)))
            await asyncio.sleep(0)

    async def end(self) -> None:
        """End the running compilation and those queued for it."""
        for _ in self.tasks:
            self.may_end.release()
        async with asyncio.timeout(30):
            await asyncio.gather(*self.tasks)


async def test_clients_take_turns_for_grammars() -> None:
    compiler = Compiler(at_once=1)
    await compiler.bring("a", "a", "a", "a", "b", "c", "b")
    await compiler.end()
    assert compiler.order == ["a", "a", "b", "c", "a", "b", "a"]
    assert compiler.turns.num_waiting == 0


async def test_one_client_has_half_of_the_places() -> None:
    compiler = Compiler(at_once=4)
    await compiler.bring(*"aaa", "b")
    assert compiler.order == ["a", "a", "b"], (
        "one place is left to others, though a third one waits"
    )
    await compiler.end()
    routers = Compiler(at_once=4)
    await routers.bring("", "", "", "", "")
    assert routers.order == [""] * 4, "those that are not told apart have all of them"
    await routers.end()


async def test_those_that_wait_are_bounded_in_all_and_of_each_client() -> None:
    compiler = Compiler(at_once=1, max_waiting=8)
    await compiler.bring("a", "a", "a")
    with pytest.raises(CapacityError, match="2 grammars of this client wait"):
        await compiler.compile("a")
    await compiler.bring("b", "b", "c", "c", "d", "d")
    with pytest.raises(CapacityError, match="8 grammars wait to be compiled, which is the limit"):
        await compiler.compile("e")
    await compiler.end()


async def test_a_client_that_leaves_gives_its_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(at_once=1)
    await compiler.bring("a", "b", "c")
    compiler.tasks[1].cancel()
    await asyncio.gather(compiler.tasks[1], return_exceptions=True)
    compiler.may_end.release()
    await eventually(lambda: compiler.order == ["a", "c"], "a turn")
    monkeypatch.setattr(turns, "WAIT_S", 0.01)
    with pytest.raises(CapacityError, match=r"kept the compiler busy for 0.01 s, the limit"):
        await compiler.compile("d")
    compiler.tasks[2].cancel()
    await asyncio.gather(compiler.tasks[2], return_exceptions=True)
    compiler.may_end.release()
    await compiler.compile("e")
    assert compiler.order == ["a", "c", "e"]


async def test_a_client_may_bring_a_burst_and_then_so_many_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "WAIT_S", 0.5)
    allowances = Allowances(per_s=1.0)
    async with asyncio.timeout(0.4):
        for _ in range(BURST):
            await allowances.take("a")
            await allowances.take("b")
    with pytest.raises(
        CapacityError, match="32 new grammars at once and 1 more a second"
    ) as refused:
        await allowances.take("a")
    assert refused.value.retry_after_s == pytest.approx(1.5, abs=0.4)
    for _ in range(3 * BURST):
        await allowances.take("")
    quick = Allowances(per_s=1000.0)
    async with asyncio.timeout(30):
        for _ in range(3 * BURST):
            await quick.take("a")
