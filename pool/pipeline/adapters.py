"""The adapters that a process of a pool holds, and the change of the set while it serves."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from functools import partial

from pool.stage.adapters import LoadedAdapters
from protos import pipeline_pb2 as pb
from runtime.errors import BatonError, ConfigError

OnEngine = Callable[[Callable[[], None]], Awaitable[None]]


async def hold_adapters(
    adapters: LoadedAdapters | None, keys: Collection[str], on_engine: OnEngine
) -> None:
    """Hold exactly these adapters on a stage.

    Others are dropped first, by `on_engine`, which runs a call between two steps. The missing ones
    are loaded in another thread, so no step waits for them.

    Raises:
        ConfigError: an adapter cannot be loaded.
    """
    if adapters is None:
        if keys:
            raise ConfigError("this stage was started without adapters", field="adapters")
        return
    for key in adapters.keys:
        if key not in keys:
            await on_engine(partial(adapters.drop, key))
    for key in keys:
        if key not in adapters.keys:
            await asyncio.get_running_loop().run_in_executor(adapters.loading, adapters.load, key)


class AdaptersOfFollower:
    """The adapters of a process that follows a leader. Belongs to the event loop's thread."""

    def __init__(
        self,
        adapters: LoadedAdapters | None,
        submit: Callable[[Callable[[], None]], Future[None]],
    ) -> None:
        """Create it; `submit` runs a call between two steps."""
        self._adapters = adapters
        self._submit = submit
        self._order = asyncio.Lock()

    async def hold(self, command: pb.HoldAdapters) -> pb.AdaptersHeld:
        """Carry out a command of the leader, after all earlier ones; return the answer."""
        answer = pb.AdaptersHeld(number=command.number)
        async with self._order:
            try:
                await hold_adapters(
                    self._adapters,
                    command.keys,
                    lambda call: asyncio.wrap_future(self._submit(call)),
                )
            except BatonError as error:
                answer.problem = str(error)
        return answer
