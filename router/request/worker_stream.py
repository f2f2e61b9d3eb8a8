"""The streams of one request to its workers, and the timer of the replies that they owe.

`WorkerStream` is a place on the call that all requests to a worker share. Messages are sent without
waiting, and events are delivered as they arrive. The stream lives as long as the request on that
worker: `close` makes the worker give the request up.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from protos import decode_pb2, prefill_pb2
from router.request.events import Received, StreamEnded
from router.workers.worker import Worker
from router.workers.worker_call import WorkerCall
from runtime.clock import STALLED_S
from runtime.errors import BatonError, PeerLostError

logger = logging.getLogger(__name__)

InputT = TypeVar("InputT", prefill_pb2.PrefillInput, decode_pb2.DecodeInput)
EventT = TypeVar("EventT", prefill_pb2.PrefillEvent, decode_pb2.DecodeEvent)


class WorkerStream(Generic[InputT, EventT]):
    """One request on one worker. Implements `router.workers.worker_call.RequestReceiver`."""

    def __init__(
        self,
        number: int,
        worker: Worker,
        call: WorkerCall[InputT, EventT],
        deliver: Callable[[Received | StreamEnded], object],
    ) -> None:
        """Call `open` instead."""
        self._number = number
        self._worker = worker
        self._call: WorkerCall[InputT, EventT] = call
        self._deliver = deliver
        self._key = 0
        self._is_ending = False

    @classmethod
    def open(
        cls,
        number: int,
        worker: Worker,
        call: WorkerCall[InputT, EventT],
        opening: InputT,
        deliver: Callable[[Received | StreamEnded], object],
    ) -> Self:
        """Open a stream to `worker`. Never fails: the loss of a worker is delivered.

        `number` identifies the stream in the events that are delivered.
        """
        stream = cls(number, worker, call, deliver)
        worker.attach(stream)
        stream._key = call.open(stream, opening)
        return stream

    def send(self, message: InputT, *, is_last: bool = False) -> None:
        """Send a message. Never waits and never fails: the end of a dead stream is delivered.

        `is_last`: the worker ends the stream by itself after it.
        """
        self._is_ending = is_last
        self._call.send(self._key, message)

    @property
    def unsent(self) -> InputT | None:
        """Return the last message while it may still be changed, else None."""
        return self._call.unsent(self._key)

    def close(self, *, is_ending: bool = False) -> None:
        """End the stream now. Every stream must be closed, also one that has ended.

        `is_ending`: the worker ends it by itself.
        """
        self._call.leave(self._key, is_ending=self._is_ending or is_ending)
        self._worker.detach(self)

    def received(self, event: EventT) -> None:
        """Deliver a message."""
        self._deliver(Received(self._number, event))

    def ended(self, error: BatonError | None) -> None:
        """Deliver the end of the stream."""
        self._deliver(StreamEnded(self._number, error))

    def call_lost(self, reason: str) -> None:
        """Deliver the loss of the worker."""
        self.ended(self.lost(reason))

    def lost(self, reason: str) -> PeerLostError:
        """Log the loss of the worker; return an error for the client, without addresses."""
        logger.info("stream lost", extra={"worker": self._worker.address, "reason": reason})
        return PeerLostError(f"the {self._worker.role} worker was lost")


class DueTimer:
    """Timer that calls `overdue` when a due reply has not arrived in time.

    One timer serves all replies of a request: it is moved if it fires too early. Build it inside a
    running event loop.
    """

    def __init__(self, overdue: Callable[[], object]) -> None:
        self._overdue = overdue
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_at_s: float | None = None  # by the loop; None while no reply is due
        self._extended_to_s = 0.0

    def expect(self, at_s: float | None) -> None:
        """Expect a reply by `at_s` of the loop's time, in place of any other; None: expect none."""
        self._due_at_s = at_s
        if at_s is not None and (self._timer is None or self._timer.when() > at_s):
            self._set(at_s)

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        self._due_at_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due_at_s is None:
            return
        now_s = self._loop.time()
        at_s = max(self._due_at_s, self._extended_to_s)
        if now_s < at_s:
            self._set(at_s)
        elif now_s - at_s >= STALLED_S:
            # This router did not run, for example because its process was stopped. Messages that
            # the worker sent meanwhile are handled first.
            self._extended_to_s = now_s + STALLED_S
            self._set(self._extended_to_s)
        else:
            self._overdue()
