"""Which peers take nothing and give nothing though messages are under way to or from them. Pure."""

from collections.abc import Collection
from typing import Generic, TypeVar

from runtime.clock import HELD_UP_S, Clock

PeerT = TypeVar("PeerT")

PEER_SILENCE_S = 5.0


class SilentPeers(Generic[PeerT]):
    """To be called several times a second. A network that loses packets without an error ends no
    message, and no keepalive of UCX's is sent while bytes wait to be acknowledged: only that
    nothing moves shows it.

    Time between calls that lie far apart counts for little: a process that was held up itself did
    not see what its peers did.
    """

    def __init__(self, clock: Clock, limit_s: float = PEER_SILENCE_S) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._asked_s = clock.now()
        self._silent_s: dict[PeerT, float] = {}

    def over_limit(self, busy: Collection[PeerT], moved: Collection[PeerT]) -> list[PeerT]:
        """Of the `busy` peers, those with messages under way, the ones of whose messages none has
        ended for longer than the limit; `moved` are those of which one has since the last call."""
        now = self._clock.now()
        passed_s, self._asked_s = min(now - self._asked_s, HELD_UP_S), now
        self._silent_s = {
            peer: 0.0
            if peer in moved or peer not in self._silent_s
            else self._silent_s[peer] + passed_s
            for peer in busy
        }
        return [peer for peer, silent_s in self._silent_s.items() if silent_s > self._limit_s]
