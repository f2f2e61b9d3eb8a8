"""The adapters that all stages of a pool hold, and the change of the set while they serve."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future

from pool.pipeline.membership import StageLink
from pool.stage.adapters import LoadedAdapters
from protos import pipeline_pb2 as pb
from runtime.errors import BatonError, ConfigError, UnavailableError

HOLD_TIMEOUT_S = 60.0  # seconds for a stage to load adapters from its disk

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
            await on_engine(lambda key=key: adapters.drop(key))  # type: ignore[misc]
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


class AdaptersOfStages:
    """The leader's questions to the other processes of its pool, and their answers.

    Belongs to the event loop's thread.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        # By number: the rank that was asked, and its problem or "".
        self._asked: dict[int, tuple[int, asyncio.Future[str]]] = {}

    async def hold(self, link: StageLink, keys: Sequence[str]) -> None:
        """Have a process hold exactly these adapters.

        Raises:
            ConfigError: an adapter cannot be loaded there.
            UnavailableError: it was lost, or does not answer.
        """
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[number] = link.rank, answer
        try:
            async with asyncio.timeout(HOLD_TIMEOUT_S):
                link.send(hold_adapters=pb.HoldAdapters(number=number, keys=keys))
                problem = await answer
        except TimeoutError:
            raise UnavailableError(
                f"process {link.rank} of the pool has not loaded adapters within {HOLD_TIMEOUT_S:g} s"
            ) from None
        finally:
            del self._asked[number]
        if problem:
            raise ConfigError(f"process {link.rank} of the pool: {problem}", field="adapters")

    def answered(self, rank: int, answer: pb.AdaptersHeld) -> None:
        """Take an answer; one that is not expected any more has no effect."""
        asked, waiting = self._asked.get(answer.number, (0, None))
        if waiting is not None and asked == rank and not waiting.done():
            waiting.set_result(answer.problem)

    def stage_lost(self, rank: int, error: BatonError) -> None:
        """Fail the questions to a lost process."""
        for asked, waiting in self._asked.values():
            if asked == rank and not waiting.done():
                waiting.set_exception(error.again())
