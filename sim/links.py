"""Transfers of handoffs over network interfaces that share their bandwidth fairly.

Every worker has one interface. A handoff gets the smaller of an equal part of its sender's outgoing
and of its receiver's incoming bandwidth. The remainder of the larger part is not given to others,
so rates are those of max-min fairness or slightly below. Bytes leave when they are available: those
of a prompt while it is computed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

_ROUNDING = 1e-9  # of a handoff's bytes


@dataclass(eq=False)
class Interface:
    """Network interface of one worker; bandwidth in bytes per second each way."""

    bytes_per_s: float
    leaving: dict["Sending", None] = field(default_factory=dict)  # with bytes to send
    arriving: dict["Sending", None] = field(default_factory=dict)
    num_sent: float = 0.0  # bytes
    num_vain: float = 0.0  # those of them that belonged to cancelled transfers


@dataclass(frozen=True)
class Arrival:
    """Interface of a decode pool that expects a prompt, and the callback for its arrival."""

    interface: Interface
    on_received: Callable[[], None]


ArrivalTable = dict[tuple[str, int], Arrival]
"""Expected prompts by session and epoch, as in destination terms."""


class Sending:
    """Transfer of one handoff between two interfaces. Ends once, on arrival of all bytes or by
    `cancel`.
    """

    def __init__(
        self, source: Interface, target: Interface, num_bytes: float, on_arrived: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.source = source
        self.target = target
        self._num_bytes = self._left = num_bytes
        self._ready = 0.0  # available bytes, out of those left
        self.rate = 0.0
        self._since_s = 0.0
        self._on_arrived = on_arrived
        self._timer: asyncio.TimerHandle | None = None

    def release(self, num_bytes: float) -> None:
        """Make more bytes available."""
        self.settle()
        self._ready = min(self._ready + num_bytes, self._left)
        if self._ready > 0 and self not in self.source.leaving:
            self.source.leaving[self] = self.target.arriving[self] = None
            self._share()
        else:
            self.plan()

    def cancel(self) -> None:
        """Stop the transfer; the remaining bytes do not arrive. Idempotent."""
        self.settle()
        if not self._has_left:
            self.source.num_vain += self._num_bytes - self._left
        self._left = self._ready = 0.0
        self._leave()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self in self.source.leaving:
            del self.source.leaving[self], self.target.arriving[self]
            self._share()

    def _share(self) -> None:
        """Set new rates for all transfers that share an interface with this one."""
        for other in {**self.source.leaving, **self.target.arriving}:
            other.settle()
            source = other.source
            target = other.target
            other.rate = min(
                source.bytes_per_s / len(source.leaving), target.bytes_per_s / len(target.arriving)
            )
            other.plan()

    def settle(self) -> None:
        """Account for the bytes that have left since the last call."""
        now = self._loop.time()
        if self in self.source.leaving:
            self._move(min(self._ready, self.rate * (now - self._since_s)))
        self._since_s = now

    def _move(self, num_bytes: float) -> None:
        self._ready -= num_bytes
        self._left -= num_bytes
        self.source.num_sent += num_bytes

    def plan(self) -> None:
        """Set the timer for the moment when the available bytes will have left, at the current
        rate.
        """
        if self._timer is not None:
            self._timer.cancel()
        if self in self.source.leaving:  # also with zero bytes left, to notice the end
            self._timer = self._loop.call_later(self._ready / self.rate, self._drained)

    def _drained(self) -> None:
        """Handle that all available bytes have left."""
        self._move(self._ready)
        self._leave()
        if self._has_left:
            self._on_arrived()

    @property
    def _has_left(self) -> bool:
        """Return whether all bytes have left, apart from rounding."""
        return self._left <= _ROUNDING * self._num_bytes
