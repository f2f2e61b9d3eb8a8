"""A request's run on a prefill worker, on one after the other if need be."""

import asyncio
from typing import Self

from protos import prefill_pb2, prefill_pb2_grpc, transfer_pb2
from router.request.worker_stream import RETRY_PAUSE_S, FlowParts, WorkerStream, cancel, may_retry, search, suspect
from router.workers.worker import Booking
from runtime.errors import BatonError, PeerLostError

PrefillCall = WorkerStream[prefill_pb2.RunRequest, prefill_pb2.RunResponse]


class PrefillStream:
    """Attempts to run the prompt; the first one is opened by the flow."""

    def __init__(self, parts: FlowParts, booking: Booking, stream: PrefillCall) -> None:
        """`open` makes one."""
        self._parts = parts
        self._booking = booking
        self._tried: frozenset[str] = frozenset()
        self._attempts = 1
        self._search: asyncio.Task[None] | None = None
        self.has_first_token = False  # drawn by the present attempt
        self.stream = stream

    @classmethod
    def open(cls, parts: FlowParts, booking: Booking) -> Self:
        """Run the prompt on the worker that is booked."""
        return cls(parts, booking, _run(parts, booking))

    @property
    def address(self) -> str:
        return self._booking.worker.address

    def deliver_to(self, destination: transfer_pb2.DestinationTerms) -> None:
        self.stream.send(prefill_pb2.RunRequest(destination=destination))

    def computed(self) -> None:
        """The prompt waits for nothing on that worker any more."""
        self.has_first_token = True
        self._booking.computed()

    def overdue(self) -> BatonError:
        """What it means that everything was sent and nothing said."""
        return PeerLostError("the prefill worker sent a handoff and did not say the first token in time")

    def move_on(self, error: BatonError, compatibility: str) -> None:
        """Run the prompt on another worker, or on the same one once it is back if there is no other.

        Raises:
            BatonError: `error`, if a retry cannot help or none is left.
        """
        self.close()
        suspect(self._booking, error)
        self._tried |= {self.address}
        if self._attempts >= self._parts.limits.prefill_attempts or not may_retry(error):
            raise error
        self._search = self._parts.group.create_task(self._reopen(error, compatibility))

    def close(self) -> None:
        """Idempotent."""
        cancel(self._search)
        self.stream.close()
        self._booking.release()

    async def _reopen(self, error: BatonError, compatibility: str) -> None:
        await asyncio.sleep(RETRY_PAUSE_S)
        directory, prompt = self._parts.directory, self._parts.request.prompt_token_ids
        self._booking = await search(
            directory, lambda: directory.book_prefill(prompt, compatibility, tried=self._tried,
                                                      context_tokens=self._parts.context_tokens),
            self._parts.limits.peer_wait_s, error)
        self._attempts += 1
        self.has_first_token = False
        self.stream = _run(self._parts, self._booking)


def _run(parts: FlowParts, booking: Booking) -> PrefillCall:
    stub = prefill_pb2_grpc.PrefillStub(booking.worker.channel)
    stream = WorkerStream.open(stub.Run, booking.worker, parts.inbox.put, parts.group, parts.time_left_s())
    stream.send(prefill_pb2.RunRequest(request=parts.request))
    return stream
