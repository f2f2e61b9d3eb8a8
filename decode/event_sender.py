"""What one request of a decode pool sends to its router, each thing that is drawn with its position
in the output, so that nothing lost or doubled passes for an answer.

Tokens that the router was not sent yet join, so a router that reads slowly gets fewer and longer
messages, and what waits is bounded by what its requests may draw. Event loop's thread.
"""

from collections.abc import Sequence

from engine.core.request import DrawnToken
from pool.request.conversion import extend_chunk
from pool.request.router_call import EventSender
from protos import decode_pb2 as pb
from protos import transfer_pb2

MAX_JOINED = 64  # tokens of one event


class DecodeEventSender:
    """`pool.request.router_call.EventSender` in the words of this role."""

    def __init__(self, event_sender: EventSender[pb.DecodeEvent], position: int = 0) -> None:
        """`position`: output tokens that the router has."""
        self._event_sender = event_sender
        self._key = event_sender.key
        self._position = position
        self._tokens: pb.DecodeEvent | None = None  # the last ones
        self._room = 0  # for so many more there

    def destination(self, terms: transfer_pb2.DestinationTerms) -> None:
        """Memory is reserved, and receives are posted."""
        self._event_sender.send(pb.DecodeEvent(key=self._key, destination=terms))

    def committed(self, committed: pb.DecodeCommitted) -> None:
        """The request joins, before anything else."""
        self._event_sender.send(
            pb.DecodeEvent(key=self._key, position=self._position, committed=committed)
        )

    def local(self, local: pb.DecodeLocal) -> None:
        """The same of a request without a source."""
        self._event_sender.send(pb.DecodeEvent(key=self._key, position=self._position, local=local))

    def drawn(self, tokens: Sequence[DrawnToken]) -> None:
        position, num_tokens = self._position, len(tokens)
        self._position += num_tokens
        if (
            self._tokens is None
            or self._room < num_tokens
            or self._event_sender.unsent is not self._tokens
        ):
            self._tokens, self._room = pb.DecodeEvent(key=self._key, position=position), MAX_JOINED
            self._event_sender.send(self._tokens, MAX_JOINED)
        self._room -= num_tokens
        extend_chunk(self._tokens.tokens, tokens)

    def finished(self, finished: pb.DecodeFinished) -> None:
        """Nothing comes after it but the end."""
        self._event_sender.send(
            pb.DecodeEvent(key=self._key, position=self._position, finished=finished)
        )
