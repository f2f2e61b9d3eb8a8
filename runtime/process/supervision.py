"""Process lifecycle: signals, fail-fast background work, exit codes.

    def main() -> int:
        return run_process("prefill", run)                   # 0 stopped as asked, 1 failed, 2 bad config, 70 a bug

    async def run(stop: StopSignal) -> None:                 # the composition root
        ...start...
        async with background(stop, pool.run(), directory.run()):     # the first to fail ends the process
            await stop.wait()
        await server.drain(grace_s)

Work without its own drain runs under `interruptible(stop, work())`. A second signal ends the
process without draining.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

from runtime.errors import BatonError, ConfigError, InternalError
from runtime.observe.log import report_end
from runtime.process.host_memory import is_out_of_memory, memory_left

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_BUG = 70
_NO_THREAD = "can't start new thread"  # message of Python's threading


class StopSignal:
    """Event that SIGTERM, SIGINT or the process itself sets once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._reason = ""

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self, reason: str) -> None:
        if not self._event.is_set():
            self._reason = reason
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


@asynccontextmanager
async def background(stop: StopSignal, *work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` concurrently with the block.

    A failure sets `stop` at once and is raised when the block has ended. Leaving the block cancels
    the work that still runs.
    """
    tasks = [asyncio.create_task(item) for item in work]
    for task in tasks:
        task.add_done_callback(lambda ended: _stop_on_failure(stop, ended))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def interruptible(stop: StopSignal, work: Coroutine[None, None, None]) -> bool:
    """Run `work` to its end, or cancel it when `stop` is set. Returns whether it completed.

    Each cancellation of this call cancels `work` exactly once. The cleanup of `work` completes
    before this raises CancelledError.
    """
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
    if working.cancelled():
        return False
    working.result()
    return True


def _stop_on_failure(stop: StopSignal, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        stop.set(f"{type(error).__name__}: {error}")


def run_process(name: str, run: Callable[[StopSignal], Awaitable[None]]) -> int:
    """Run a composition root to its end and return the exit code.

    A failure becomes one line on stderr.
    """
    try:
        asyncio.run(_with_signals(name, run))
    except BaseExceptionGroup as group:
        return _exit_code(name, first_leaf(group))
    except (Exception, asyncio.CancelledError, KeyboardInterrupt) as error:  # noqa: BLE001 (the process edge)
        return _exit_code(name, error)
    return 0


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that came first, at any depth of nested groups."""
    first = group.exceptions[0]
    return first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


def _exit_code(name: str, error: BaseException) -> int:
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        report_end(f"{name}: stopped at once")
        return EXIT_FAILED
    if isinstance(error, BatonError) and not isinstance(error, InternalError):
        report_end(f"{name}: {error}")
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    if is_out_of_memory(error):
        report_end(f"{name}: out of memory; {memory_left()}")
        return EXIT_FAILED
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        report_end(
            f"{name}: no thread can be started: memory, or the number of threads a user or container may have, "
            f"is used up"
        )
        return EXIT_FAILED
    logger.critical("%s failed because of a bug", name, exc_info=error)
    return EXIT_BUG


async def _with_signals(name: str, run: Callable[[StopSignal], Awaitable[None]]) -> None:
    stop = StopSignal()
    loop = asyncio.get_running_loop()
    root = asyncio.current_task()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set and root is not None:
            root.cancel()
        logger.info("%s: %s", name, f"{number.name}, stopping")
        stop.set(number.name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await run(stop)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a TaskGroup whose first BatonError is raised directly, not in an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        known = failures.subgroup(BatonError)
        raise first_leaf(failures if known is None else known) from None
