import asyncio
from collections.abc import Callable

import pytest

from protos import generation_pb2 as pb
from runtime.errors import CapacityError, DeadlineError, InvalidRequestError
from runtime.intake import Intake, IntakeLimits, Seats, bounded
from tests.router.harness import eventually


def at_once(release: Callable[[], None]) -> None:
    release()


async def never() -> str:
    await asyncio.sleep(600)
    return "never"


async def ready() -> str:
    return "read"


async def test_a_message_that_is_there_waits_only_for_the_patience_with_those_that_dribble() -> None:
    intake = Intake(IntakeLimits(places=2, patience_s=0.05, limit_s=60))
    dribbling = [asyncio.create_task(intake.receive(never, at_once)) for _ in range(6)]
    await eventually(lambda: intake.num_reading == 2, "no reads")
    async with asyncio.timeout(20):
        assert await intake.receive(ready, at_once) == "read"
    failed = [task for task in dribbling if task.done()]
    assert failed, "the ones read for longest made room"
    assert all(isinstance(task.exception(), DeadlineError) for task in failed)
    for task in dribbling:
        task.cancel()
    await asyncio.gather(*dribbling, return_exceptions=True)
    assert intake.num_reading == 0


async def test_nobody_is_hurried_while_there_is_room() -> None:
    intake = Intake(IntakeLimits(places=2, patience_s=0.001, limit_s=60))
    slow = asyncio.create_task(intake.receive(never, at_once))
    for _ in range(100):
        assert await intake.receive(ready, at_once) == "read"
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def test_a_message_that_never_comes_has_a_limit_and_keeps_its_place_until_its_call_is_over() -> None:
    intake, over = Intake(IntakeLimits(places=1, patience_s=60, limit_s=0.05)), list[Callable[[], None]]()
    with pytest.raises(DeadlineError):
        await intake.receive(never, over.append)
    with pytest.raises(CapacityError, match="1 messages are being received"):
        await intake.receive(ready, over.append)
    over[0]()
    assert await intake.receive(ready, over.append) == "read"
    assert len(over) == 1


async def test_a_cancelled_read_gives_its_place_back() -> None:
    intake = Intake(IntakeLimits(places=1, patience_s=60, limit_s=60))
    task = asyncio.create_task(intake.receive(never, at_once))
    await eventually(lambda: intake.num_reading, "no read")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await intake.receive(ready, at_once) == "read"


def test_seats_bound_calls_and_bytes_and_are_given_back() -> None:
    seats = Seats("calls", 2, 100)
    with seats.taken(), seats.taken(), seats.holding(60):
        with pytest.raises(CapacityError, match="2 calls are under way"), seats.taken():
            pass
        with pytest.raises(CapacityError, match="60 bytes and this one 41; the limit is 100"), seats.holding(41):
            pass
        with seats.holding(40):
            assert seats.num_bytes == 100
    assert (seats.num_calls, seats.num_bytes) == (0, 0)
    with seats.holding(101):
        pass  # one alone is bounded by the size of a message


def test_what_is_too_long_is_not_parsed_and_what_is_no_message_is_named() -> None:
    parse = bounded(pb.AbortRequest.FromString, 4)
    assert parse(b"\x0a\x02ab").request_ids == ["ab"]
    with pytest.raises(InvalidRequestError, match="at most 4 bytes, this one has 5"):
        parse(b"\x0a\x03abc")
    with pytest.raises(InvalidRequestError, match="no message of its type"):
        parse(b"\xff\xff")
