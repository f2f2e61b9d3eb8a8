"""The wait of a queue's only reader, for queues that keep their items in forms of their own."""

import asyncio


class QueueReader:
    """The one reader of a queue. Belongs to the event loop's thread.

    The reader calls `wait` while the queue has nothing for it, in a loop. Whatever adds something
    calls `wake`, which costs nothing while the reader is busy.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the reader if it waits."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self) -> None:
        """Wait for the next `wake`."""
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting
