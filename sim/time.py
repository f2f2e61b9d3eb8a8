"""Virtual time: an event loop whose clock jumps to the next thing that is due instead of waiting for it.

Whatever awaits runs on it unchanged: timers, deadlines and pauses take no time of this machine. Code that runs costs no
virtual time.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from runtime.errors import InternalError

T = TypeVar("T")


class _Skipper(selectors.SelectSelector):
    """Where a loop waits for the next timer, time jumps to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise InternalError("the simulation waits for something that will never happen")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Sockets and threads have no place on it."""

    def __init__(self) -> None:
        self._skipper = _Skipper()
        super().__init__(self._skipper)

    def time(self) -> float:
        return self._skipper.now_s


class LoopClock:
    """A `Clock` that shows a loop's time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in virtual time.

    Raises:
        InternalError: everything waits and no timer is left.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
