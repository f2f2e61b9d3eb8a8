"""The prefill of a request: attempts on one worker after the other. Pure."""

from protos import prefill_pb2, transfer_pb2
from router.request.events import (
    BookedWorker,
    Close,
    MarkLost,
    OpenPrefill,
    Outbox,
    Release,
    SearchPrefill,
    Send,
)
from router.request.retries import is_suspect, may_retry
from router.request.transitions import (
    SOURCE_TRANSITIONS,
    IllegalEventError,
    SourceState,
    SourceStep,
    Stateful,
)
from runtime.errors import BatonError


class RequestSource(Stateful[SourceState, SourceStep]):
    """Attempts to prefill a prompt on a booked worker, and on others when it fails."""

    def __init__(self, worker: BookedWorker, max_attempts: int, out: Outbox) -> None:
        super().__init__(SOURCE_TRANSITIONS, SourceState.BOOKED)
        self.worker = worker
        self.number = 0  # of the stream, the search or the check; 0 without
        self.error: BatonError | None = None  # of the latest failed attempt
        self._max_attempts = max_attempts
        self._attempts = 1
        self._has_destination = False  # of the current attempt
        self._tried: frozenset[str] = frozenset()
        self._out = out

    def open(self) -> None:
        """Start the prompt on the booked worker."""
        self.move(SourceStep.OPEN)
        self._open()

    def deliver_to(self, destination: transfer_pb2.DestinationTerms) -> None:
        """Send the terms of the pool's reservation to the worker."""
        self._has_destination = True
        self._out.append(Send(self.number, prefill_pb2.PrefillInput(destination=destination)))

    def sent(self) -> None:
        """Record that every byte has left.

        Raises:
            IllegalEventError: the worker was not told where to send them.
        """
        if not self._has_destination:
            raise IllegalEventError("a worker sent a prompt without destination terms")
        self.move(SourceStep.SENT)

    def computed(self) -> None:
        """Record the first token: the prompt no longer queues on the worker."""
        self.move(SourceStep.FIRST_TOKEN)
        self._out.append(Release(self.worker, is_computed=True))

    def computed_in_place(self) -> None:
        """Record the first token of a prompt that the pool, the same worker, has computed."""
        self.move(SourceStep.CLOSE)
        self._out.append(Release(self.worker, is_computed=True))

    def joined(self) -> None:
        """End the attempt: the pool has the whole prompt.

        The worker is told if it has sent everything. Otherwise a worker that it replaced had.
        """
        if self.state is not SourceState.COMPUTED:
            self.close()
            return
        self.move(SourceStep.RELEASE)
        released = prefill_pb2.PrefillInput(release=prefill_pb2.PrefillRelease())
        self._out.append(Send(self.number, released, is_last=True))

    def lose_link(self, error: BatonError) -> int:
        """Give the attempt up after a failed handoff; return the number for the check."""
        self.move(SourceStep.LOSE_LINK)
        self._drop(error)
        self.number = self._out.number()
        return self.number

    def fail(self, error: BatonError, pool: BookedWorker) -> None:
        """Search for another worker for this pool, or for the same one after its restart.

        Raises:
            BatonError: `error`, if a retry cannot help or no attempt is left.
        """
        if self.state is not SourceState.LINK_FAILED:
            self._drop(error)
        self.move(SourceStep.FAIL)
        if self._attempts >= self._max_attempts or not may_retry(error):
            raise error
        self.number = self._out.number()
        self._out.append(SearchPrefill(self.number, pool, self._tried))

    def found(self, worker: BookedWorker) -> None:
        """Start the prompt on the worker that a search has booked."""
        self.move(SourceStep.FOUND)
        self.worker = worker
        self._attempts += 1
        self._open()

    def close(self) -> None:
        """Close the stream or the search, and release the booking. Idempotent."""
        if self.state is not SourceState.CLOSED:
            self.move(SourceStep.CLOSE)
            self._leave()
            self._out.append(Release(self.worker))

    def _open(self) -> None:
        self._has_destination = False
        self.number = self._out.number()
        self._out.append(OpenPrefill(self.number, self.worker))

    def _drop(self, error: BatonError) -> None:
        self.error = error
        self._leave()
        self._out.append(Release(self.worker))
        if is_suspect(error):
            self._out.append(MarkLost(self.worker, str(error)))
        self._tried |= {self.worker.address}

    def _leave(self) -> None:
        if self.number:
            self._out.append(Close(self.number))
            self.number = 0
