"""The events of one prefill request for its router."""

import time
from collections import deque

from pool.request.streams import EventSender
from protos import prefill_pb2 as pb
from protos import types_pb2
from runtime.errors import FieldViolation, InvalidRequestError

MAX_UNREAD_SCORES = 16  # events; the limit that prefill.proto documents


class PrefillEventSender:
    """Sender of the events of one prompt.

    The scores of a long prompt can arrive faster than a slow client reads them. At most
    `MAX_UNREAD_SCORES` scored events are in flight; later events wait in order.
    """

    def __init__(self, event_sender: EventSender[pb.PrefillEvent]) -> None:
        self._event_sender = event_sender
        self._key = event_sender.key
        self._num_unread = 0  # scored events that the client has not taken
        self._waiting: deque[pb.PrefillEvent] = deque()  # events held back by the limit
        self._stalled_since_s = 0.0
        self._stalled_s = 0.0  # total of earlier waits

    @property
    def is_stalled(self) -> bool:
        """Return whether an event waits until the client reads."""
        return bool(self._waiting)

    @property
    def stalled_s(self) -> float:
        """Return the total seconds that events have waited for the client to read."""
        return self._stalled_s + (
            time.monotonic() - self._stalled_since_s if self._waiting else 0.0
        )

    def started(self, started: pb.PrefillStarted) -> None:
        self._send(pb.PrefillEvent(key=self._key, started=started))

    def scored(self, scored: types_pb2.PromptLogprobs) -> None:
        self._send(pb.PrefillEvent(key=self._key, scored=scored))

    def first_token(self, token: pb.PrefillFirstToken) -> None:
        self._send(pb.PrefillEvent(key=self._key, first_token=token))

    def sent(self, sent: pb.PrefillSent) -> None:
        self._send(pb.PrefillEvent(key=self._key, sent=sent))

    def scores_read(self, read: pb.PrefillScoresRead) -> None:
        """Count scored events as read and send the events that waited for them.

        Raises:
            InvalidRequestError: more events were read than were sent.
        """
        if read.count > self._num_unread:
            raise InvalidRequestError(
                FieldViolation(
                    "scores_read.count",
                    f"{read.count} exceeds the {self._num_unread} unread events",
                )
            )
        self._num_unread -= read.count
        stalled_s = self.stalled_s
        while self._waiting and self._may_go(self._waiting[0]):
            self._pass(self._waiting.popleft())
        self._stalled_s, self._stalled_since_s = stalled_s, time.monotonic()

    def _send(self, event: pb.PrefillEvent) -> None:
        if self._waiting or not self._may_go(event):
            if not self._waiting:
                self._stalled_since_s = time.monotonic()
            self._waiting.append(event)
        else:
            self._pass(event)

    def _pass(self, event: pb.PrefillEvent) -> None:
        self._event_sender.send(event, max(1, len(event.scored.token_ids)))

    def _may_go(self, event: pb.PrefillEvent) -> bool:
        """Return whether the event may be sent now; count it if it carries scores."""
        if not event.HasField("scored"):
            return True
        if self._num_unread >= MAX_UNREAD_SCORES:
            return False
        self._num_unread += 1
        return True
