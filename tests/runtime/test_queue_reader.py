"""The wait of a queue's only reader."""

import asyncio

from runtime.queue_reader import QueueReader


async def test_a_waiting_reader_is_woken_once_however_often_it_is_called() -> None:
    reader = QueueReader()
    reader.wake()  # it does not wait yet
    waiting = asyncio.create_task(reader.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    reader.wake()
    reader.wake()
    async with asyncio.timeout(5):
        await waiting
    again = asyncio.create_task(reader.wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not again.done(), "earlier calls do not count for a later wait"
    again.cancel()


async def test_a_cancelled_reader_is_not_woken() -> None:
    reader = QueueReader()
    waiting = asyncio.create_task(reader.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    reader.wake()
    assert waiting.cancelled()
