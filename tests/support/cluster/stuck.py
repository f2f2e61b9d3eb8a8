"""A report of a request that gets no further: what waits for what, in a cluster in this process.

A stall that one run in thousands has cannot be looked at afterwards. The report goes to the test's
output, which is shown if the test fails.
"""

import asyncio
import faulthandler
import gc
import sys
import tempfile
from collections.abc import Iterator
from types import CoroutineType, FrameType

from decode.entry import DecodeEntry
from prefill.prompts import PrefillEntry
from router.request.flow import RequestFlow
from router.request.machine import RequestMachine
from transfer.session import ReceiveSession, SendSession

LIMIT_S = 25.0  # of a request of a few tokens; clients' deadlines are later
LOOK_S = 1.0
MAX_CHARS = 2000  # of the representation of an object
_REQUEST = RequestFlow.run.__qualname__
_SHOWN = (RequestMachine, PrefillEntry, DecodeEntry, SendSession, ReceiveSession)


async def report_stuck_requests() -> None:
    """Report, once for each request, a router's request that takes longer than `LIMIT_S`."""
    loop = asyncio.get_running_loop()
    since: dict[asyncio.Task[object], float] = {}
    reported = set[asyncio.Task[object]]()
    while True:
        running = {task for task in asyncio.all_tasks() if _name(task) == _REQUEST}
        since = {task: since.get(task, loop.time()) for task in running}
        reported &= running
        for task in running - reported:
            if loop.time() - since[task] > LIMIT_S:
                reported.add(task)
                sys.stdout.write(f"a request takes longer than {LIMIT_S:g} s\n{report()}")
        await asyncio.sleep(LOOK_S)


def report() -> str:
    """Return the state of requests, tasks and threads of this process."""
    lines = ["requests:"]
    for each in gc.get_objects():
        if type(each) in _SHOWN:  # isinstance would ask proxies of other libraries
            lines.append(f"  {_shown(each)}")
    lines.append("tasks:")
    for task in asyncio.all_tasks():
        calls = [f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in _frames(task)]
        if calls:  # gRPC's own tasks have none
            lines.append(f"  {task.get_name()}: {' > '.join(calls)}")
    lines.append("threads:")
    with tempfile.TemporaryFile("w+") as file:  # faulthandler writes to descriptors only
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines.append(file.read())
    return "\n".join(lines)


def _name(task: asyncio.Task[object]) -> str:
    coroutine = task.get_coro()
    return coroutine.__qualname__ if isinstance(coroutine, CoroutineType) else repr(coroutine)


def _frames(task: asyncio.Task[object]) -> Iterator[FrameType]:
    """Yield the suspended calls of a task's own coroutines, outermost first."""
    awaited: object = task.get_coro()
    while isinstance(awaited, CoroutineType) and awaited.cr_frame is not None:
        yield awaited.cr_frame
        awaited = awaited.cr_await


def _shown(each: object) -> str:
    values = ", ".join(
        f"{name}={' '.join(repr(value).split()):.200}"
        for name, value in vars(each).items()
        if name != "_table"  # of a state machine
    )
    return f"{type(each).__name__}({values})"[:MAX_CHARS]
