"""Blocking gRPC calls that survive Ctrl-C.

Python raises KeyboardInterrupt in the main thread between any two instructions, also between the
acquisition of a lock and the block that releases it. A gRPC call shares such locks with the thread
that serves its channel. An interrupt at that moment leaves a lock acquired, and no call of this
channel ever ends again. Here another thread makes the call, and the main thread waits on a queue
that is implemented in C.

    uninterrupted(lambda: stub.GetLoad(request))            uninterrupted_stream(lambda: stub.Generate(request))
"""

import threading
from _thread import start_new_thread  # Thread.start waits under such a lock
from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_LOOK_S = 0.1  # an interrupt right before a wait does not end the wait


class StreamingCall(Protocol[T_co]):
    """Call with a stream of responses."""

    def __iter__(self) -> Iterator[T_co]: ...

    def cancel(self) -> object: ...


def uninterrupted(function: Callable[[], T]) -> T:
    """Run `function` to its end and return or raise its result.

    A KeyboardInterrupt ends only the wait, not the function.
    """
    if not _can_be_interrupted():
        return function()
    results: SimpleQueue[_Result[T]] = SimpleQueue()
    start_new_thread(lambda: results.put(_Result(function)), ())
    return _next_of(results).value()


def uninterrupted_stream(begin: Callable[[], StreamingCall[T]]) -> Generator[T, None, None]:
    """Yield the messages of the call that `begin` returns, each read on request.

    Closing the generator cancels the call.
    """
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
    """Result or error of a function, passed to another thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._error: BaseException | None = None
        try:
            self._value = function()
        except BaseException as error:  # noqa: BLE001 (raised again in the waiting thread)
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
    """Reader of a call on its own thread, one message per `next`."""

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
        """Return the next message.

        Raises the call's errors, and StopIteration after the last message.
        """
        self._steps.put(self._read)
        return _next_of(self._results).value()

    def close(self) -> None:
        self._is_closed = True
        self._steps.put(None)
        if self._call is not None:
            start_new_thread(self._call.cancel, ())  # takes a lock of the call

    def _read(self) -> T:
        if self._messages is None:
            self._call = call = self._begin()
            self._messages = iter(call)
            if self._is_closed:  # closed while the call began, when `close` had no call to cancel
                call.cancel()
        return next(self._messages)
