"""Requests whose cache is being computed on this stage: how far each layer is, and which transfers
send what is done.

Where the stage runs on a device, a layer that was launched is not done: `LayerGate` holds it until
the device has passed its event.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from runtime.clock import Clock
from runtime.errors import BatonError, HandoffError
from transfer.agent.sender import Sender
from transfer.agent.stage_transfer import StageTransfer
from transfer.agent.transfer_table import TransferTable

IdT = TypeVar("IdT", bound=Hashable)

POLL_S = 100e-6
LOOK_AHEAD = 8


class Tombstones(Generic[IdT]):
    """Ids of what is over, so that late messages about them are not taken for new ones. Bounded:
    the oldest ids are dropped."""

    def __init__(self, max_entries: int = 65_536) -> None:
        self._max_entries = max_entries
        self._ids: OrderedDict[IdT, None] = OrderedDict()

    def add(self, ended: IdT) -> None:
        self._ids[ended] = None
        self._ids.move_to_end(ended)
        if len(self._ids) > self._max_entries:
            self._ids.popitem(last=False)

    def clear(self) -> None:
        self._ids.clear()

    def __contains__(self, candidate: object) -> bool:
        return candidate in self._ids

    def __len__(self) -> int:
        return len(self._ids)


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

    A layer's chunks pass in the order in which they were launched, whatever order their events pass
    in: a count of n tokens always means all of the first n. At most `limit` layers wait, each at
    most `timeout_s`. Events are queried every `POLL_S`, a few of the oldest at a time: those of one
    stream pass in order.
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
                f"(tokens up to {layer.num_tokens})"
            )
            self.forget(layer.request_key)
        return errors

    def forget(self, request_key: int) -> None:
        self._launched = deque(
            each for each in self._launched if each.layer.request_key != request_key
        )

    def clear(self) -> None:
        self._launched.clear()


@dataclass
class Prompt:
    """`layer_tokens`: how many of its tokens have passed each layer. `error`: why it can never be
    sent."""

    num_tokens: int | None
    layer_tokens: dict[int, int] = field(default_factory=dict)
    transfers: list[StageTransfer] = field(default_factory=list)
    error: BatonError | None = None


class Prompts:
    """For the agent's thread.

    A cancelled request is closed here while batches with it may still be computed; what these
    report of it comes too late and must not bring it back. Keys are one leader's own: the next
    one's begin anew, after `clear`.
    """

    def __init__(
        self, transfers: TransferTable, clock: Clock, *, max_waiting: int, layer_s: float
    ) -> None:
        self._transfers = transfers
        self._gate = LayerGate(clock, limit=max_waiting, timeout_s=layer_s)
        self._by_key: dict[int, Prompt] = {}
        self._closed = Tombstones[int]()

    @property
    def num_open(self) -> int:
        """Requests that are followed."""
        return len(self._by_key)

    @property
    def num_waiting(self) -> int:
        """Layers that were given to the device and are not known to be done."""
        return self._gate.num_waiting

    def expect(self, request_key: int, num_tokens: int | None) -> Prompt:
        """The request's, made if it is new. Of a closed request: one with an error, which is not
        kept."""
        if self.is_closed(request_key):
            return Prompt(num_tokens, error=HandoffError(f"request {request_key} is over"))
        return self._by_key.setdefault(request_key, Prompt(num_tokens))

    def is_closed(self, request_key: int) -> bool:
        """Whether `close` was called for it, and `clear` not since."""
        return request_key in self._closed

    def layer_done(self, layer: DoneLayer, after: DeviceEvent | None) -> None:
        """Release it, or wait for the event first. Unknown requests are ignored."""
        if layer.request_key not in self._by_key:
            return
        if after is None:
            self._release(layer)
            return
        try:
            self._gate.add(layer, after)
        except HandoffError as error:
            self._fail(layer.request_key, error)

    def poll(self) -> bool:
        """Release what the device has done, fail what it takes too long for. Whether there was
        anything."""
        passed, overdue = self._gate.passed(), self._gate.overdue()
        for layer in passed:
            self._release(layer)
        for request_key, error in overdue.items():
            self._fail(request_key, error)
        return bool(passed or overdue)

    def forget_session(self, session_id: str) -> None:
        for prompt in self._by_key.values():
            prompt.transfers = [
                transfer for transfer in prompt.transfers if transfer.session_id != session_id
            ]

    def close(self, request_key: int) -> None:
        """Close the request's transfers and drop it, for good."""
        self._closed.add(request_key)
        self._gate.forget(request_key)
        prompt = self._by_key.pop(request_key, None)
        for transfer in prompt.transfers if prompt is not None else ():
            self._transfers.close_transfer(transfer)

    def clear(self) -> None:
        self._gate.clear()
        self._by_key.clear()
        self._closed.clear()

    def _release(self, layer: DoneLayer) -> None:
        prompt = self._by_key[layer.request_key]
        prompt.layer_tokens[layer.layer_id] = layer.num_tokens
        for transfer in prompt.transfers:
            if isinstance(transfer, Sender):
                transfer.release({layer.layer_id: layer.num_tokens})

    def _fail(self, request_key: int, error: BatonError) -> None:
        self._gate.forget(request_key)
        prompt = self._by_key[request_key]
        prompt.error = error
        for transfer in prompt.transfers:
            self._transfers.fail(transfer, error)
