"""Blocking calls into gRPC that a Ctrl-C cannot break.

Python raises KeyboardInterrupt in the main thread between any two instructions, hence also between
the taking of a lock and the block that gives it back. A call of gRPC and the thread that serves its
channel share such locks: an interrupt at that moment leaves one taken, and no call of this channel
ever ends again. Here another thread calls, and the main thread waits on a queue that is written in
C.

    uninterrupted(lambda: stub.GetLoad(request))            uninterrupted_stream(lambda: stub.Generate(request))
"""

import threading
from _thread import start_new_thread  # Thread.start waits under a lock of that kind
from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_LOOK_S = 0.1  # an interrupt right before a wait does not end the wait


class StreamingCall(Protocol[T_co]):
    """A call whose answer is a stream."""

    def __iter__(self) -> Iterator[T_co]: ...

    def cancel(self) -> object: ...


def uninterrupted(function: Callable[[], T]) -> T:
    """What `function` returns or raises. A KeyboardInterrupt does not end it, but the wait for
    it."""
    if not _can_be_interrupted():
        return function()
    results: SimpleQueue[_Result[T]] = SimpleQueue()
    start_new_thread(lambda: results.put(_Result(function)), ())
    return _next_of(results).value()


def uninterrupted_stream(begin: Callable[[], StreamingCall[T]]) -> Generator[T, None, None]:
    """The messages of the call that `begin` returns, each read when it is asked for. Closing
    cancels the call."""
    if _can_be_interrupted():
        yield from _read_aside(begin)
        return
    call = begin()
    try:
        yield from call
    finally:
        call.cancel()


def _can_be_interrupted() -> bool:
    return threading.current_thread() is threading.main_thread()


def _next_of(queue: SimpleQueue[T]) -> T:
    while True:
        try:
            return queue.get(timeout=_LOOK_S)
        except Empty:
            continue


class _Result(Generic[T]):
    """What a function returned or raised, on its way to another thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._error: BaseException | None = None
        try:
            self._value = function()
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            self._error = error

    def value(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value


def _read_aside(begin: Callable[[], StreamingCall[T]]) -> Generator[T, None, None]:
    reader = _AsideReader(begin)
    try:
        start_new_thread(reader.run, ())
        while True:
            try:
                message = reader.next()
            except StopIteration:
                return
            yield message
    finally:
        reader.close()


class _AsideReader(Generic[T]):
    """Reads a call on a thread of its own, a message per `next`."""

    def __init__(self, begin: Callable[[], StreamingCall[T]]) -> None:
        self._begin = begin
        self._call: StreamingCall[T] | None = None
        self._messages: Iterator[T] | None = None
        self._is_closed = False
        self._steps: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._results: SimpleQueue[_Result[T]] = SimpleQueue()

    def run(self) -> None:
        while (step := self._steps.get()) is not None:
            self._results.put(_Result(step))

    def next(self) -> T:
        """Raises what the call raises, StopIteration behind its last message."""
        self._steps.put(self._read)
        return _next_of(self._results).value()

    def close(self) -> None:
        self._is_closed = True
        self._steps.put(None)
        if self._call is not None:
            start_new_thread(self._call.cancel, ())  # takes a lock of the call's

    def _read(self) -> T:
        if self._messages is None:
            self._call = call = self._begin()
            self._messages = iter(call)
            if self._is_closed:  # while the call began, when `close` saw none
                call.cancel()
        return next(self._messages)
