"""A report of a request that gets no further: what waits for what, in a cluster in this process.

A stall that one run in thousands has cannot be looked at afterwards. The report goes to the test's
output, which is shown if the test fails.
"""

import asyncio
import faulthandler
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
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
_PACKAGES = {"decode", "engine", "pool", "prefill", "router", "tests", "transfer"}
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
    stacks = {task: list(_frames(task)) for task in asyncio.all_tasks()}
    lines = ["requests:"]
    lines += (f"  {_shown(each)}" for each in _held(stacks.values()))
    lines.append("tasks:")
    for task, stack in stacks.items():
        calls = [f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in stack]
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


def _held(stacks: Iterable[list[FrameType]]) -> Iterator[object]:
    """Yield the states of requests that the suspended calls lead to.

    `gc.get_objects` would find them, too, but it also takes hold of tuples that other threads have
    not filled yet, which makes CPython fail there with a SystemError.
    """
    found = [each for stack in stacks for frame in stack for each in frame.f_locals.values()]
    seen = dict[int, object]()
    while found:
        each = found.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if type(each) in _SHOWN:
            yield each
        else:
            found += _parts(each)


def _parts(each: object) -> list[object]:
    """Return what an object of this product or a collection refers to."""
    match each:
        case dict():
            return list(each.values())
        case list() | tuple() | set() | deque():
            return list(each)
    if type(each).__module__.partition(".")[0] not in _PACKAGES:
        return []
    try:
        return list(vars(each).values())
    except TypeError:  # it has slots
        return []


def _shown(each: object) -> str:
    values = ", ".join(
        f"{name}={' '.join(repr(value).split()):.200}"
        for name, value in vars(each).items()
        if name != "_table"  # of a state machine
    )
    return f"{type(each).__name__}({values})"[:MAX_CHARS]
