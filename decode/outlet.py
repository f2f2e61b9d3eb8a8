"""What one request of a decode pool sends to its router, each thing that is drawn with its position in the output, so
that nothing lost or doubled passes for an answer.

Tokens that the router was not sent yet join, so a router that reads slowly gets fewer and longer messages, and what
waits is bounded by what its requests may draw. Event loop's thread.
"""

from pool.request.router_call import Outlet
from protos import decode_pb2 as pb
from protos import transfer_pb2, types_pb2

MAX_JOINED = 64  # tokens of one event


class DecodeOutlet:
    """`pool.request.router_call.Outlet` in the words of this role."""

    def __init__(self, outlet: Outlet[pb.DecodeEvent], position: int = 0) -> None:
        """`position`: output tokens that the router has."""
        self._outlet = outlet
        self._key = outlet.key
        self._position = position

    def destination(self, terms: transfer_pb2.DestinationTerms) -> None:
        """Memory is reserved, and receives are posted."""
        self._outlet.send(pb.DecodeEvent(key=self._key, destination=terms))

    def committed(self, committed: pb.DecodeCommitted) -> None:
        """The request joins, before anything else."""
        self._outlet.send(pb.DecodeEvent(key=self._key, position=self._position, committed=committed))

    def local(self, local: pb.DecodeLocal) -> None:
        """The same of a request without a source."""
        self._outlet.send(pb.DecodeEvent(key=self._key, position=self._position, local=local))

    def drawn(self, tokens: types_pb2.TokenChunk) -> None:
        unsent, position = self._outlet.unsent, self._position
        self._position += len(tokens.token_ids)
        if unsent is not None and unsent.HasField("tokens") \
                and len(unsent.tokens.token_ids) + len(tokens.token_ids) <= MAX_JOINED:
            unsent.tokens.MergeFrom(tokens)
            return
        self._outlet.send(pb.DecodeEvent(key=self._key, position=position, tokens=tokens), MAX_JOINED)

    def finished(self, finished: pb.DecodeFinished) -> None:
        """Nothing comes after it but the end."""
        self._outlet.send(pb.DecodeEvent(key=self._key, position=self._position, finished=finished))
