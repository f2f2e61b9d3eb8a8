"""The events that a request of a decode pool sends to its router.

Every event with tokens carries their position in the output, so the router detects lost or repeated
ones. Tokens that are not sent yet are joined, so a router that reads slowly gets fewer and longer
messages. Unsent data is bounded by the tokens that its requests may generate. Belongs to the event
loop's thread.
"""

from collections.abc import Sequence

from engine.core.request import SampledToken
from pool.request.conversion import extend_chunk
from pool.request.streams import EventSender
from protos import decode_pb2 as pb
from protos import transfer_pb2

MAX_JOINED = 64  # tokens of one event


class DecodeEventSender:
    """A `pool.request.streams.EventSender` with one method per event of this role."""

    def __init__(self, event_sender: EventSender[pb.DecodeEvent], position: int = 0) -> None:
        """Create a sender; `position` is the number of output tokens that the router has."""
        self._event_sender = event_sender
        self._key = event_sender.key
        self._position = position
        self._tokens: pb.DecodeEvent | None = None  # the newest event with tokens
        self._room = 0  # tokens that still fit into it

    def destination(self, terms: transfer_pb2.DestinationTerms) -> None:
        """Send the destination terms: memory is reserved and receives are posted."""
        self._event_sender.send(pb.DecodeEvent(key=self._key, destination=terms))

    def committed(self, committed: pb.DecodeCommitted) -> None:
        """Send that the request joins the running batch; this comes before its tokens."""
        self._event_sender.send(
            pb.DecodeEvent(key=self._key, position=self._position, committed=committed)
        )

    def local(self, local: pb.DecodeLocal) -> None:
        """Send that a request without a source has started here."""
        self._event_sender.send(pb.DecodeEvent(key=self._key, position=self._position, local=local))

    def generated(self, tokens: Sequence[SampledToken]) -> None:
        position = self._position
        num_tokens = len(tokens)
        self._position += num_tokens
        if (
            self._tokens is None
            or self._room < num_tokens
            or self._event_sender.unsent is not self._tokens
        ):
            self._tokens = pb.DecodeEvent(key=self._key, position=position)
            self._room = MAX_JOINED
            self._event_sender.send(self._tokens, MAX_JOINED)
        self._room -= num_tokens
        extend_chunk(self._tokens.tokens, tokens)

    def finished(self, finished: pb.DecodeFinished) -> None:
        """Send the last event before `ended`."""
        self._event_sender.send(
            pb.DecodeEvent(key=self._key, position=self._position, finished=finished)
        )
