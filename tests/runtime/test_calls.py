"""Contents and order of shared messages."""

import asyncio

import pytest

from runtime.rpc.calls import MessageLimits, SendQueue

WIDE = MessageLimits(max_items=100, max_weight=1000)


async def test_queued_items_are_taken_as_one_message_in_order_per_request() -> None:
    queue = SendQueue[str](WIDE)
    for item in ("1a", "2a", "1b", "2b"):
        queue.put(int(item[0]), item)
    taken = await queue.take()
    assert [item for item in taken if item[0] == "1"] == ["1a", "1b"]
    assert [item for item in taken if item[0] == "2"] == ["2a", "2b"]
    assert len(queue) == 0


async def test_a_waiting_reader_gets_all_items_put_in_the_same_loop_turn() -> None:
    queue = SendQueue[str](WIDE)
    reading = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    woken = asyncio.Event()

    async def answer() -> None:
        await woken.wait()
        queue.put(2, "the answer")

    answering = asyncio.create_task(answer())
    await asyncio.sleep(0)
    queue.put(1, "first")
    woken.set()
    assert await reading == ["first", "the answer"]
    await answering


async def test_a_slow_reader_gets_long_messages_within_the_limits() -> None:
    queue = SendQueue[int](MessageLimits(max_items=10, max_weight=1000))
    for item in range(25):
        queue.put(7, item)
    assert [await queue.take() for _ in range(3)] == [
        list(range(10)),
        list(range(10, 20)),
        list(range(20, 25)),
    ]


@pytest.mark.parametrize(
    ("weights", "lengths"),
    [([40, 40, 40], [2, 1]), ([100, 1], [1, 1]), ([500, 1], [1, 1]), ([1, 500, 1], [1, 1, 1])],
)
async def test_heavy_items_are_sent_alone(weights: list[int], lengths: list[int]) -> None:
    queue = SendQueue[int](MessageLimits(max_items=100, max_weight=100))
    for number, weight in enumerate(weights):
        queue.put(1, number, weight)
    taken = [await queue.take() for _ in lengths]
    assert [len(message) for message in taken] == lengths
    assert [item for message in taken for item in message] == list(range(len(weights)))


async def test_queued_items_can_be_changed_or_dropped_until_taken() -> None:
    queue = SendQueue[list[str]](WIDE)
    queue.put(1, ["a"])
    queue.put(2, ["x"])
    newest = queue.newest(1)
    assert newest is not None
    newest.append("b")
    assert queue.drop(2) == (["x"],)
    assert queue.drop(2) == ()
    assert await queue.take() == [["a", "b"]]
    assert queue.newest(1) is None


async def test_a_reader_keeps_waiting_after_all_items_were_dropped() -> None:
    queue = SendQueue[str](WIDE)
    reading = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.put(1, "dropped")
    queue.drop(1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not reading.done()
    queue.put(1, "kept")
    assert await reading == ["kept"]


async def test_a_closed_queue_is_read_to_its_end_and_one_that_failed_is_not() -> None:
    queue = SendQueue[str](WIDE)
    queue.put(1, "last")
    queue.close()
    queue.close(RuntimeError("too late"))
    assert [await queue.take() for _ in range(3)] == [["last"], [], []]
    failed = SendQueue[str](WIDE)
    failed.put(1, "never sent")
    reading = asyncio.create_task(failed.take())
    failed.close(RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        await reading
