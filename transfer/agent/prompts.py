"""Requests whose cache this stage computes: progress of each layer, and transfers that send it.

On a device, a launched layer is not done yet: `LayerGate` holds it until the device has passed its
event.
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
    """Ids of ended items, so that late messages about them are not mistaken for new ones.

    The number of ids is limited; the oldest ones are dropped.
    """

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
    """Position in a device's work queue, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has passed the event. Never waits."""
        ...


class DoneLayer(NamedTuple):
    """Report that the first `num_tokens` tokens of the request have passed the layer."""

    request_key: int
    layer_id: int
    num_tokens: int


@dataclass(frozen=True)
class _Launched:
    layer: DoneLayer
    event: DeviceEvent
    # A float rather than a Deadline, as every layer of every chunk has one. It is by the clock of
    # the gate.
    deadline_s: float


class LayerGate:
    """Queue of layers that wait for their device events. Belongs to one thread.

    The chunks of a layer pass in the order of their launch, whatever the order of their events: a
    count of n tokens always means all of the first n. At most `limit` layers wait, each for at most
    `timeout_s`. Events are queried every `POLL_S`, only a few of the oldest ones at a time: those
    of one stream pass in order.
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
        """Hold a layer until its event has passed. Raises HandoffError if too many layers wait."""
        if len(self._launched) >= self._limit:
            raise HandoffError(f"{self._limit} layers wait for the device, which is the limit")
        self._launched.append(_Launched(layer, event, self._clock.now() + self._timeout_s))

    def passed(self) -> list[DoneLayer]:
        """Return the layers that the device has done since the last call."""
        now = self._clock.now()
        if not self._launched or now < self._next_poll_s:
            return []
        self._next_poll_s = now + POLL_S
        answers: dict[DeviceEvent, bool] = {}
        num_open = 0
        behind = set[tuple[int, int]]()
        done = list[DoneLayer]()
        kept = deque[_Launched]()
        while self._launched and num_open < LOOK_AHEAD:
            launched = self._launched.popleft()
            event = launched.event
            place = launched.layer[:2]
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
        """Return an error for each request with a layer that took too long, and drop its layers."""
        errors: dict[int, HandoffError] = {}
        now = self._clock.now()
        while self._launched and now >= self._launched[0].deadline_s:
            layer = self._launched[0].layer
            errors[layer.request_key] = HandoffError(
                f"layer {layer.layer_id} was not done {self._timeout_s} s after its launch on the device "
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
class PromptTransfer:
    """Progress of one prompt.

    `layer_tokens` is the number of tokens that have passed each layer. `error` is the reason why
    the prompt cannot be sent.
    """

    num_tokens: int | None
    layer_tokens: dict[int, int] = field(default_factory=dict)
    transfers: list[StageTransfer] = field(default_factory=list)
    error: BatonError | None = None


@dataclass(frozen=True)
class _Held:
    """A transfer of cached entries that a device may still compute."""

    transfer: Sender
    after: DeviceEvent
    deadline_s: float


class PromptTransfers:
    """Table of prompts. Belongs to the agent's thread.

    A cancelled request is closed here while batches with it may still run. Their reports come too
    late and must not reopen it. Keys belong to one leader: the next leader reuses them after
    `clear`.
    """

    def __init__(
        self, transfers: TransferTable, clock: Clock, *, max_waiting: int, layer_s: float
    ) -> None:
        self._transfers = transfers
        self._gate = LayerGate(clock, limit=max_waiting, timeout_s=layer_s)
        self._by_key: dict[int, PromptTransfer] = {}
        self._closed = Tombstones[int]()
        self._held: list[_Held] = []  # transfers of cached entries
        self._clock = clock
        self._layer_s = layer_s

    @property
    def num_open(self) -> int:
        """Return the number of open requests."""
        return len(self._by_key)

    @property
    def num_waiting(self) -> int:
        """Return the number of layers and cached entries that the device may not be done with."""
        return self._gate.num_waiting + len(self._held)

    def expect(self, request_key: int, num_tokens: int | None) -> PromptTransfer:
        """Return the prompt of a request, which is created if it is new.

        For a closed request, returns a prompt with an error, which is not stored.
        """
        if self.is_closed(request_key):
            return PromptTransfer(num_tokens, error=HandoffError(f"request {request_key} is over"))
        return self._by_key.setdefault(request_key, PromptTransfer(num_tokens))

    def is_closed(self, request_key: int) -> bool:
        """Return whether `close` was called for the request since the last `clear`."""
        return request_key in self._closed

    def layer_done(self, layer: DoneLayer, after: DeviceEvent | None) -> None:
        """Release a layer, after its event if there is one. Unknown requests are ignored."""
        if layer.request_key not in self._by_key:
            return
        if after is None:
            self._release(layer)
            return
        try:
            self._gate.add(layer, after)
        except HandoffError as error:
            self._fail(layer.request_key, error)

    def release_all(self, transfer: StageTransfer, after: DeviceEvent | None) -> None:
        """Release all layers of a transfer, after the event if there is one."""
        if not isinstance(transfer, Sender):
            return
        if after is None or after.query():
            transfer.release_all()
        else:
            self._held.append(_Held(transfer, after, self._clock.now() + self._layer_s))

    def poll(self) -> bool:
        """Release the layers that the device has done, and fail the overdue ones.

        Returns whether there were any.
        """
        if self._held:
            self._poll_held()
        passed = self._gate.passed()
        overdue = self._gate.overdue()
        for layer in passed:
            self._release(layer)
        for request_key, error in overdue.items():
            self._fail(request_key, error)
        return bool(passed or overdue)

    def _poll_held(self) -> None:
        now, still = self._clock.now(), []
        for held in self._held:
            if held.after.query():
                held.transfer.release_all()
            elif now >= held.deadline_s:
                error = HandoffError(
                    f"the device was not done with cached entries in {self._layer_s} s"
                )
                self._transfers.fail(held.transfer, error)
            else:
                still.append(held)
        self._held = still

    def forget_session(self, session_id: str) -> None:
        self._held = [each for each in self._held if each.transfer.session_id != session_id]
        for prompt in self._by_key.values():
            prompt.transfers = [
                transfer for transfer in prompt.transfers if transfer.session_id != session_id
            ]

    def close(self, request_key: int) -> None:
        """Close the request's transfers and drop the request permanently."""
        self._closed.add(request_key)
        self._gate.forget(request_key)
        prompt = self._by_key.pop(request_key, None)
        for transfer in prompt.transfers if prompt is not None else ():
            self._transfers.close_transfer(transfer)

    def clear(self) -> None:
        self._gate.clear()
        self._held.clear()
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
