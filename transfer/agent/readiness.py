"""Layers whose work was given to a device, until the device has done it."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from runtime.clock import Clock
from runtime.errors import HandoffError

POLL_S = 100e-6
LOOK_AHEAD = 8


class DeviceEvent(Protocol):
    """A place in a device's queue of work. A `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether the device has passed it. Never waits."""
        ...


class DoneLayer(NamedTuple):
    """The first `num_tokens` tokens of the request have passed the layer."""

    request_key: int
    layer_id: int
    num_tokens: int


@dataclass(frozen=True)
class _Launched:
    layer: DoneLayer
    event: DeviceEvent
    until_s: float


class LayerGate:
    """Holds layers back until their events have passed; for one thread.

    A layer's chunks pass in the order in which they were launched, whatever order their events pass in: what is said of
    the first n tokens holds for all of them. At most `limit` layers wait, each at most `timeout_s`. Events are asked
    about every `POLL_S`, a few of the oldest at a time: those of one stream pass in order.
    """

    def __init__(self, clock: Clock, *, limit: int, timeout_s: float) -> None:
        self._clock = clock
        self._limit = limit
        self._timeout_s = timeout_s
        self._launched: deque[_Launched] = deque()
        self._next_poll_s = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._launched)

    def add(self, layer: DoneLayer, event: DeviceEvent) -> None:
        """Raises HandoffError when too many wait."""
        if len(self._launched) >= self._limit:
            raise HandoffError(f"{self._limit} layers wait for the device, and no more may")
        self._launched.append(_Launched(layer, event, self._clock.now() + self._timeout_s))

    def passed(self) -> list[DoneLayer]:
        """Layers the device has done since the last call."""
        now = self._clock.now()
        if not self._launched or now < self._next_poll_s:
            return []
        self._next_poll_s = now + POLL_S
        answers: dict[DeviceEvent, bool] = {}
        num_open, behind = 0, set[tuple[int, int]]()
        done, kept = list[DoneLayer](), deque[_Launched]()
        while self._launched and num_open < LOOK_AHEAD:
            launched = self._launched.popleft()
            event, place = launched.event, launched.layer[:2]
            if event not in answers:
                answers[event] = event.query()
                num_open += not answers[event]
            if answers[event] and place not in behind:
                done.append(launched.layer)
            else:
                behind.add(place)
                kept.append(launched)
        self._launched.extendleft(reversed(kept))
        return done

    def overdue(self) -> dict[int, HandoffError]:
        """Requests with a layer that took too long; nothing of them waits any more."""
        errors: dict[int, HandoffError] = {}
        now = self._clock.now()
        while self._launched and now >= self._launched[0].until_s:
            layer = self._launched[0].layer
            errors[layer.request_key] = HandoffError(
                f"layer {layer.layer_id} was not done {self._timeout_s} s after it was given to the device "
                f"(tokens up to {layer.num_tokens})")
            self.forget(layer.request_key)
        return errors

    def forget(self, request_key: int) -> None:
        self._launched = deque(each for each in self._launched if each.layer.request_key != request_key)

    def clear(self) -> None:
        self._launched.clear()
