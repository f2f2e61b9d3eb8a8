"""A request's run on a prefill worker, on one after the other if need be."""

import asyncio
from typing import Self

from protos import prefill_pb2, prefill_pb2_grpc, transfer_pb2
from router.request.stream_base import RETRY_PAUSE_S, Leg, cancel, may_retry, search, suspect
from router.request.worker_stream import WorkerStream
from router.workers.worker import Booking
from runtime.errors import BatonError, PeerLostError

PrefillStream = WorkerStream[prefill_pb2.RunRequest, prefill_pb2.RunResponse]


class PrefillLeg:
    """Attempts to run the prompt; the first one is opened by the flow."""

    def __init__(self, leg: Leg, booking: Booking, stream: PrefillStream) -> None:
        """`open` makes legs."""
        self._leg = leg
        self._booking = booking
        self._tried: frozenset[str] = frozenset()
        self._attempts = 1
        self._search: asyncio.Task[None] | None = None
        self.has_first_token = False  # drawn by the present attempt
        self.stream = stream

    @classmethod
    def open(cls, leg: Leg, booking: Booking) -> Self:
        """Run the prompt on the worker that is booked."""
        return cls(leg, booking, _run(leg, booking))

    @property
    def address(self) -> str:
        return self._booking.worker.address

    def deliver_to(self, landing: transfer_pb2.Landing) -> None:
        self.stream.send(prefill_pb2.RunRequest(landing=landing))

    def computed(self) -> None:
        """The prompt waits for nothing on that worker any more."""
        self.has_first_token = True
        self._booking.release()

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
        if self._attempts >= self._leg.limits.prefill_attempts or not may_retry(error):
            raise error
        self._search = self._leg.group.create_task(self._reopen(error, compatibility))

    def close(self) -> None:
        """Idempotent."""
        cancel(self._search)
        self.stream.close()
        self._booking.release()

    async def _reopen(self, error: BatonError, compatibility: str) -> None:
        await asyncio.sleep(RETRY_PAUSE_S)
        directory, prompt = self._leg.directory, self._leg.request.prompt_token_ids
        self._booking = await search(
            directory, lambda: directory.book_prefill(prompt, compatibility, tried=self._tried),
            self._leg.limits.peer_wait_s, error)
        self._attempts += 1
        self.has_first_token = False
        self.stream = _run(self._leg, self._booking)


def _run(leg: Leg, booking: Booking) -> PrefillStream:
    stub = prefill_pb2_grpc.PrefillStub(booking.worker.channel)
    stream = WorkerStream.open(stub.Run, booking.worker, leg.inbox.put, leg.group, leg.time_left_s())
    stream.send(prefill_pb2.RunRequest(request=leg.request))
    return stream
