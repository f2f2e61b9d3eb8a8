"""Arrival times over shared interfaces, against values computed by hand."""

import asyncio

from sim.links import Interface, Sending
from sim.time import run_virtually


class Watched:
    """Transfers whose arrivals are recorded by name."""

    def __init__(self) -> None:
        self.arrived: dict[str, float] = {}

    def transfer(
        self, name: str, source: Interface, target: Interface, num_bytes: float
    ) -> Sending:
        loop = asyncio.get_running_loop()
        return Sending(
            source, target, num_bytes, lambda: self.arrived.update({name: round(loop.time(), 6)})
        )


def test_one_sender_shares_its_bandwidth() -> None:
    """100 bytes a second: 50 bytes alone, then two halves; the first has 50 left at 0.5 s, which
    takes until 1.5 s; the second has 50 left then, and the sender to itself."""

    async def play() -> dict[str, float]:
        watched, source = Watched(), Interface(100)
        watched.transfer("first", source, Interface(1000), 100).release(100)
        await asyncio.sleep(0.5)
        watched.transfer("second", source, Interface(1000), 100).release(100)
        await asyncio.sleep(10)
        return watched.arrived

    assert run_virtually(play()) == {"first": 1.5, "second": 2.0}


def test_a_receiver_is_a_bottleneck_as_well() -> None:
    async def play() -> dict[str, float]:
        watched, target = Watched(), Interface(100)
        for name in ("first", "second"):
            watched.transfer(name, Interface(100), target, 100).release(100)
        await asyncio.sleep(10)
        return watched.arrived

    assert run_virtually(play()) == {"first": 2.0, "second": 2.0}


def test_bytes_leave_when_they_are_there() -> None:
    """Half at once, half at 3 s: a link of 100 bytes a second is idle from 0.5 s to 3 s."""

    async def play() -> tuple[dict[str, float], float]:
        watched, source, target = Watched(), Interface(100), Interface(100)
        transfer = watched.transfer("only", source, target, 100)
        transfer.release(50)
        await asyncio.sleep(3)
        transfer.release(50)
        await asyncio.sleep(10)
        return watched.arrived, source.num_sent

    assert run_virtually(play()) == ({"only": 3.5}, 100)


def test_a_handoff_that_is_given_up_leaves_its_share() -> None:
    async def play() -> tuple[dict[str, float], float]:
        watched, source = Watched(), Interface(100)
        lost = watched.transfer("lost", source, Interface(100), 100)
        for transfer in (lost, watched.transfer("kept", source, Interface(100), 100)):
            transfer.release(100)
        await asyncio.sleep(1)
        lost.cancel()
        await asyncio.sleep(10)
        return watched.arrived, source.num_vain

    assert run_virtually(play()) == ({"kept": 1.5}, 50)
