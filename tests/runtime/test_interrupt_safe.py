"""Calls that an interrupt leaves whole: the helper by itself, and a client that is interrupted at
any moment."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from runtime.rpc.interrupt_safe import uninterrupted, uninterrupted_stream
from tests.support.router.generation import EchoGeneration, serve_echo

INTERRUPTED = """
import os, random, signal, sys, threading, time
from contextlib import suppress
from baton.client import BatonClient
from baton.values import Query

def interrupt(after_s):
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGINT)

draws = random.Random(int(sys.argv[2]))
with BatonClient(sys.argv[1]) as client:
    for _ in range(200):
        with suppress(KeyboardInterrupt):
            threading.Thread(target=interrupt, args=(draws.uniform(0, 0.006),)).start()
            list(client.generate(Query("hang")))
            time.sleep(30)
        assert client.complete(Query("go on")).text == "go on "
"""


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    server, address = await serve_echo(EchoGeneration())
    yield address
    await server.drain(grace_s=0)


async def test_a_client_interrupted_at_any_moment_keeps_working(echo: str) -> None:
    """Of calls in the main thread itself about the 90th ended no more."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTED, echo, "1", stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(90):
            _, errors = await child.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    assert child.returncode == 0, errors.decode()


class Numbers:
    """A call that streams, and where it was read and cancelled."""

    def __init__(self, count: int) -> None:
        self.left = list(range(count))
        self.readers: set[threading.Thread] = set()
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[int]:
        while self.left:
            self.readers.add(threading.current_thread())
            yield self.left.pop(0)

    def cancel(self) -> None:
        self.cancelled.set()


def test_a_stream_is_read_on_another_thread_and_cancelled_when_closed() -> None:
    call = Numbers(5)
    messages = uninterrupted_stream(lambda: call)
    assert (next(messages), next(messages)) == (0, 1)
    assert call.left == [2, 3, 4], "nothing is read ahead"
    assert threading.main_thread() not in call.readers
    assert not call.cancelled.is_set()
    messages.close()
    assert call.cancelled.wait(30)


def test_a_stream_ends_and_fails_as_the_call_does() -> None:
    assert list(uninterrupted_stream(lambda: Numbers(3))) == [0, 1, 2]

    def refuse() -> Numbers:
        raise ConnectionError("no router")

    with pytest.raises(ConnectionError, match="no router"):
        next(uninterrupted_stream(refuse))


def test_a_call_that_began_while_the_stream_was_closed_is_cancelled() -> None:
    call, may_begin = Numbers(1), threading.Event()

    def begin() -> Numbers:
        may_begin.wait(30)
        return call

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            next(uninterrupted_stream(begin))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    may_begin.set()
    assert call.cancelled.wait(30)


def test_a_function_returns_and_raises_in_the_main_thread_and_in_others() -> None:
    seen: list[object] = []

    def body() -> None:
        seen.append(uninterrupted(lambda: threading.current_thread() is threading.main_thread()))
        with pytest.raises(ZeroDivisionError):
            uninterrupted(lambda: 1 // 0)
        seen.extend(uninterrupted_stream(lambda: Numbers(2)))

    body()
    other = threading.Thread(target=body)
    other.start()
    other.join(30)
    assert seen == [False, 0, 1] * 2
