"""What one prompt sends to its router. Scores of a long prompt come faster than a slow client takes them: of those only
so many are under way as the router has room for, and what follows them waits behind them. Event loop's thread."""

from collections import deque

from pool.request.router_call import Outlet
from protos import prefill_pb2 as pb
from protos import types_pb2
from runtime.errors import FieldViolation, InvalidRequestError

MAX_UNREAD_SCORES = 16  # events, as prefill.proto says


class PrefillOutlet:
    """`pool.request.router_call.Outlet` in the words of this role."""

    def __init__(self, outlet: Outlet[pb.PrefillEvent]) -> None:
        self._outlet = outlet
        self._key = outlet.key
        self._num_unread = 0  # scored events that the client has not taken
        self._held: deque[pb.PrefillEvent] = deque()  # since too many are

    @property
    def is_held_up(self) -> bool:
        """Whether something waits until the client reads."""
        return bool(self._held)

    def started(self, started: pb.PrefillStarted) -> None:
        self._send(pb.PrefillEvent(key=self._key, started=started))

    def scored(self, scored: types_pb2.PromptLogprobs) -> None:
        self._send(pb.PrefillEvent(key=self._key, scored=scored))

    def first_token(self, token: pb.PrefillFirstToken) -> None:
        self._send(pb.PrefillEvent(key=self._key, first_token=token))

    def sent(self, sent: pb.PrefillSent) -> None:
        self._send(pb.PrefillEvent(key=self._key, sent=sent))

    def scores_read(self, read: pb.PrefillScoresRead) -> None:
        """Raises InvalidRequestError for more than were sent."""
        if read.count > self._num_unread:
            raise InvalidRequestError(FieldViolation(
                "scores_read.count", f"{read.count} are more than the {self._num_unread} that are unread"))
        self._num_unread -= read.count
        while self._held and self._may_go(self._held[0]):
            self._pass(self._held.popleft())

    def _send(self, event: pb.PrefillEvent) -> None:
        if self._held or not self._may_go(event):
            self._held.append(event)
        else:
            self._pass(event)

    def _pass(self, event: pb.PrefillEvent) -> None:
        self._outlet.send(event, max(1, len(event.scored.token_ids)))

    def _may_go(self, event: pb.PrefillEvent) -> bool:
        """Counts it, if it may."""
        if not event.HasField("scored"):
            return True
        if self._num_unread >= MAX_UNREAD_SCORES:
            return False
        self._num_unread += 1
        return True
