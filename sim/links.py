"""Bytes of handoffs over network interfaces that share their bandwidth fairly.

Every worker has one interface. A handoff gets an equal part of its sender's outgoing and of its
receiver's incoming bandwidth, the smaller of both; what it cannot use of the other is not given to
others, so rates are those of max-min fairness or a little below. Bytes leave once they are there: a
prompt's while it is computed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

_ROUNDING = 1e-9  # of a handoff's bytes


@dataclass(eq=False)
class Interface:
    """Bytes per second each way."""

    bytes_per_s: float
    leaving: dict["Sending", None] = field(default_factory=dict)  # that have bytes to send
    arriving: dict["Sending", None] = field(default_factory=dict)
    num_bytes: float = 0.0  # that left or arrived
    num_vain_bytes: float = 0.0  # of those, of handoffs that were given up


@dataclass(frozen=True)
class Arrival:
    """Where a decode pool expects a prompt."""

    interface: Interface
    landed: Callable[[], None]


Arrivals = dict[tuple[str, int], Arrival]
"""By session and epoch, as destination terms name them."""


class Sending:
    """One handoff's bytes, from one interface to another. Ends once, when all have arrived or by
    `cancel`."""

    def __init__(
        self, source: Interface, target: Interface, num_bytes: float, on_arrived: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.source = source
        self.target = target
        self._num_bytes = self._left = num_bytes
        self._ready = 0.0  # of those left, bytes that are there to be sent
        self.rate = 0.0
        self._since_s = 0.0
        self._on_arrived = on_arrived
        self._timer: asyncio.TimerHandle | None = None

    def release(self, num_bytes: float) -> None:
        """So many more bytes can leave."""
        self.settle()
        self._ready = min(self._ready + num_bytes, self._left)
        if self._ready > 0 and self not in self.source.leaving:
            self.source.leaving[self] = self.target.arriving[self] = None
            self._share()
        else:
            self.plan()

    def cancel(self) -> None:
        """What has not arrived will not. Idempotent."""
        self.settle()
        if not self._has_left:
            self.source.num_vain_bytes += self._num_bytes - self._left
        self._left = self._ready = 0.0
        self._leave()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self in self.source.leaving:
            del self.source.leaving[self], self.target.arriving[self]
            self._share()

    def _share(self) -> None:
        """New rates for all that share an end with this one."""
        for other in {**self.source.leaving, **self.target.arriving}:
            other.settle()
            source, target = other.source, other.target
            other.rate = min(
                source.bytes_per_s / len(source.leaving), target.bytes_per_s / len(target.arriving)
            )
            other.plan()

    def settle(self) -> None:
        """Count what has left since the last time."""
        now = self._loop.time()
        if self in self.source.leaving:
            self._move(min(self._ready, self.rate * (now - self._since_s)))
        self._since_s = now

    def _move(self, num_bytes: float) -> None:
        self._ready -= num_bytes
        self._left -= num_bytes
        self.source.num_bytes += num_bytes
        self.target.num_bytes += num_bytes

    def plan(self) -> None:
        """When what is there will have left, at the present rate."""
        if self._timer is not None:
            self._timer.cancel()
        if self in self.source.leaving:  # also where nothing is left: that is to be noticed
            self._timer = self._loop.call_later(self._ready / self.rate, self._drained)

    def _drained(self) -> None:
        """All that was there has left."""
        self._move(self._ready)
        self._leave()
        if self._has_left:
            self._on_arrived()

    @property
    def _has_left(self) -> bool:
        """Whether all of it is gone; what is left of a sum of parts is no byte."""
        return self._left <= _ROUNDING * self._num_bytes
