"""Detection of peers that neither send nor receive although messages are in flight. Pure."""

from collections.abc import Collection
from typing import Generic, TypeVar

from runtime.clock import STALLED_S, Clock

PeerT = TypeVar("PeerT")

PEER_SILENCE_S = 5.0


class SilentPeers(Generic[PeerT]):
    """Silence of peers; call `over_limit` several times a second.

    If a network loses packets without an error, no message ends, and UCX sends no keepalive while
    bytes are unacknowledged. Only the lack of progress reveals it.

    A long interval between calls counts for little: a process that was itself stalled did not see
    its peers' progress.
    """

    def __init__(self, clock: Clock, limit_s: float = PEER_SILENCE_S) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._asked_s = clock.now()
        self._silent_s: dict[PeerT, float] = {}

    def over_limit(self, busy: Collection[PeerT], moved: Collection[PeerT]) -> list[PeerT]:
        """Return the busy peers without an ended message for longer than the limit.

        `busy` are peers with messages in flight; `moved` are peers with a message that ended since
        the last call.
        """
        now = self._clock.now()
        passed_s = min(now - self._asked_s, STALLED_S)
        self._asked_s = now
        self._silent_s = {
            peer: 0.0
            if peer in moved or peer not in self._silent_s
            else self._silent_s[peer] + passed_s
            for peer in busy
        }
        return [peer for peer, silent_s in self._silent_s.items() if silent_s > self._limit_s]
