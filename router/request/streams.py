"""The open streams of one request to its workers, by number."""

from collections.abc import Callable
from typing import Any

from protos import decode_pb2, prefill_pb2, types_pb2
from router.request.events import Close, OpenDecode, OpenPrefill, Received, Send, StreamEnded
from router.request.notes import booking_of
from router.request.worker_stream import WorkerStream
from router.workers.worker import Booking
from runtime.clock import Deadline
from runtime.errors import PeerLostError
from runtime.observe.tracing import outgoing

PrefillStream = WorkerStream[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent]
DecodeStream = WorkerStream[decode_pb2.DecodeInput, decode_pb2.DecodeEvent]


class RequestStreams:
    """The streams of one request. Their events are delivered with their numbers."""

    def __init__(
        self,
        request: types_pb2.EngineRequest,
        deadline: Deadline,
        deliver: Callable[[Received | StreamEnded], object],
    ) -> None:
        self._request = request
        self._deadline = deadline
        self._deliver = deliver
        self._trace = dict(outgoing())
        self._open: dict[int, PrefillStream | DecodeStream] = {}

    def open_prefill(self, command: OpenPrefill) -> None:
        """Open a stream to a prefill worker."""
        booking = booking_of(command.worker)
        opening = prefill_pb2.PrefillInput()
        self._fill(opening.open, booking)
        worker = booking.worker
        self._open[command.number] = WorkerStream.open(
            command.number, worker, worker.prefill_calls.current(), opening, self._deliver
        )

    def open_decode(self, command: OpenDecode) -> None:
        """Open a stream to a decode pool, unless it has restarted since it was booked."""
        booking = booking_of(command.worker)
        if command.source is not None and booking.is_outlived:
            error = PeerLostError("the decode worker restarted while the request was queued")
            self._deliver(StreamEnded(command.number, error))
            return
        opening = decode_pb2.DecodeInput()
        opening.open.replayed_token_ids.extend(command.replayed)
        if command.source is not None:
            opening.open.source.CopyFrom(command.source)
        self._fill(opening.open, booking)
        worker = booking.worker
        self._open[command.number] = WorkerStream.open(
            command.number, worker, worker.decode_calls.current(), opening, self._deliver
        )

    def send(self, command: Send) -> None:
        """Send a message; it is dropped if the stream was given up."""
        stream: Any = self._open.get(command.number)
        if stream is not None:
            stream.send(command.message, is_last=command.is_last)

    def confirm_scores(self, number: int) -> None:
        """Tell the prefill worker that the client has taken one more message of scores."""
        stream: Any = self._open.get(number)
        if stream is None:
            return
        unsent = stream.unsent
        if unsent is not None and unsent.HasField("scores_read"):
            unsent.scores_read.count += 1
        else:
            read = prefill_pb2.PrefillScoresRead(count=1)
            stream.send(prefill_pb2.PrefillInput(scores_read=read))

    def close(self, command: Close) -> None:
        """Close a stream if it is open."""
        stream = self._open.pop(command.number, None)
        if stream is not None:
            stream.close(is_ending=command.is_ending)

    def give_up(self, number: int, reason: str) -> PeerLostError | None:
        """Close the stream of a worker that counts as lost; return its error, None if not open."""
        stream = self._open.pop(number, None)
        if stream is None:
            return None
        stream.close()
        return stream.lost(reason)

    def _fill(
        self, opening: prefill_pb2.PrefillOpen | decode_pb2.DecodeOpen, booking: Booking
    ) -> None:
        """Fill in the request, its context (time left in seconds and trace), and the holder."""
        if (holder := booking.holder) is not None:
            opening.holder.address, opening.holder.role = holder.address, holder.role.value
        opening.request.CopyFrom(self._request)
        opening.context.CopyFrom(
            types_pb2.RequestContext(time_left_s=self._deadline.remaining_s(), **self._trace)
        )
