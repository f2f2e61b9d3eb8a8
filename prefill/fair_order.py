"""Start tags, by which clients take turns at a prefill worker.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the virtual time is the tag of the
latest started prompt. A prompt's tag is the virtual time of its arrival, or the end of its client's
previous prompt if that is later; its end is the tag plus its tokens divided by the client's weight.
Prompts start in the order of their tags. So two clients that both have prompts queued get tokens by
their weights, within one prompt of each. A client gains nothing by being idle.
"""

from dataclasses import dataclass, field

from prefill.prompts import PrefillEntry

MAX_CLIENTS = 1024


@dataclass
class FairOrder:
    """The virtual time of a prefill scheduler, and the ends of its clients' latest prompts."""

    _now: float = 0.0
    _ends: dict[bytes, float] = field(default_factory=dict)

    def enter(self, entry: PrefillEntry) -> None:
        """Set the tag of an arriving prompt."""
        share = entry.request.share
        entry.tag = max(self._now, self._ends.get(share.client, self._now))
        self._ends[share.client] = entry.tag + entry.remaining / share.weight
        if len(self._ends) > MAX_CLIENTS:
            # At worst the next prompt of this client comes too early.
            del self._ends[min(self._ends, key=self._ends.__getitem__)]

    def begin(self, entry: PrefillEntry, num_cached: int) -> None:
        """Note that a prompt starts. Its client need not pay for cached tokens."""
        self._now = max(self._now, entry.tag)
        self._refund(entry, num_cached)

    def leave(self, entry: PrefillEntry) -> None:
        """Note that a queued prompt will not start."""
        self._refund(entry, entry.remaining)

    def forget(self) -> None:
        """Forget all clients: the worker is idle, so no prompt waits for another."""
        self._ends.clear()

    def _refund(self, entry: PrefillEntry, num_tokens: int) -> None:
        share = entry.request.share
        if share.client in self._ends:
            self._ends[share.client] -= num_tokens / share.weight
