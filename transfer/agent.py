"""One stage's end of every handoff: posts receives into pool pages, sends pool pages, checks digests, proves drains.

The agent owns one thread, which alone touches the transport. Everything public may be called from any thread and
returns at once; what happens is reported through `on_event`, called from the agent's thread (so it must be quick: hand
the event to an event loop or a queue).

The reports of one epoch of one session, in order:

    OPEN        receives are posted, or the sends are planned
    COMPLETE    receiving: everything landed and every digest matched; sending: every byte has left
      or FAILED with a reason: nothing more is matched or sent for it
    DRAINED     only after `close`, `close_request`, `close_all` or a newer epoch, exactly once, and always last: from
                here on no read or write of that memory can happen any more

A newer epoch of a session that is open here replaces it: the old one is closed by itself, and the new one reports OPEN
only when the old one is DRAINED, so late bytes of the old epoch can land nowhere.
"""

from collections.abc import Callable

from runtime.clock import Clock
from transfer.memory import PoolMemory
from transfer.terms import Landing, SourceTerms, StageEndpoint, StageSessionEvent
from transfer.transport import Transport


class TransferAgent:
    """Sends and receives for one stage.

    Which stage of a `SourceTerms` or `Landing` this is, is told by `incarnation`: terms made for another process (an
    earlier life of this one) are refused with a FAILED report.
    """

    def __init__(self, *, memory: PoolMemory, transport: Transport, clock: Clock, incarnation: str,
                 on_event: Callable[[StageSessionEvent], None]) -> None:
        self._memory = memory
        self._transport = transport
        self._clock = clock
        self._incarnation = incarnation
        self._on_event = on_event

    @property
    def address(self) -> bytes:
        """Where peers connect to; travels only over the gRPC plane."""
        return self._transport.address

    @property
    def incarnation(self) -> str:
        return self._incarnation

    @property
    def endpoint(self) -> StageEndpoint:
        """This stage as it appears in `SourceTerms.stages` and `Landing.stages`."""
        return StageEndpoint(self._memory.geometry.layers, self.address, self._incarnation)

    def start(self) -> None:
        """Start the agent's thread. Raises InternalError when it was started before."""
        raise NotImplementedError

    def open_receive(self, source: SourceTerms, landing: Landing) -> None:
        """Post the receives of one epoch. Send the landing to the source only after every stage reported OPEN."""
        raise NotImplementedError

    def expect_send(self, request_key: int, num_tokens: int) -> None:
        """Remember `layer_done` of this request from now on; call before its first forward. `num_tokens`: its prompt."""
        raise NotImplementedError

    def layer_done(self, request_key: int, layer_id: int, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the request have passed this layer: their cache entries are final.

        For the engine thread; costs about a microsecond. Unknown requests are ignored.
        """
        raise NotImplementedError

    def open_send(self, request_key: int, source: SourceTerms, landing: Landing) -> None:
        """Send what `layer_done` releases, starting with what it has released already."""
        raise NotImplementedError

    def close(self, session_id: str) -> None:
        """Release (after COMPLETE) or abort (before). Idempotent; unknown sessions are ignored."""
        raise NotImplementedError

    def close_request(self, request_key: int) -> None:
        """Close the request's session, if one was opened, and forget its progress. Idempotent."""
        raise NotImplementedError

    def close_all(self) -> None:
        """Close every session: the pool has lost its leader."""
        raise NotImplementedError

    def peer_lost(self, incarnation: str) -> None:
        """The control plane knows that a peer process is dead: fail its sessions now and let them drain."""
        raise NotImplementedError

    def shutdown(self, timeout_s: float) -> bool:
        """Close everything, wait for the drain, stop the thread. False when the time was not enough."""
        raise NotImplementedError
