"""Requests whose cache is being computed on this stage: how far each layer is, and who sends what is done."""

from dataclasses import dataclass, field

from runtime.clock import Clock
from runtime.errors import BatonError, HandoffError
from transfer.agent.readiness import DeviceEvent, DoneLayer, LayerGate
from transfer.agent.sender import Sender
from transfer.agent.stage_transfer import StageTransfer
from transfer.agent.tombstones import Tombstones
from transfer.agent.transfer_table import TransferTable


@dataclass
class Prompt:
    """`layer_tokens`: how many of its tokens have passed each layer. `error`: why it can never be sent."""

    num_tokens: int | None
    layer_tokens: dict[int, int] = field(default_factory=dict)
    transfers: list[StageTransfer] = field(default_factory=list)
    error: BatonError | None = None


class Prompts:
    """For the agent's thread.

    A cancelled request is closed here while batches with it may still be computed; what these say of it comes too late
    and must not bring it back. Keys are one leader's own: the next one's begin anew, after `clear`.
    """

    def __init__(self, transfers: TransferTable, clock: Clock, *, max_waiting: int, layer_s: float) -> None:
        self._transfers = transfers
        self._gate = LayerGate(clock, limit=max_waiting, timeout_s=layer_s)
        self._by_key: dict[int, Prompt] = {}
        self._closed = Tombstones[int]()

    @property
    def num_open(self) -> int:
        """Requests that are remembered."""
        return len(self._by_key)

    @property
    def num_waiting(self) -> int:
        """Layers that were given to the device and are not known to be done."""
        return self._gate.num_waiting

    def expect(self, request_key: int, num_tokens: int | None) -> Prompt:
        """The request's, made if it is new. Of a closed request: one with an error, which nobody remembers."""
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
        """Release what the device has done, fail what it takes too long for. Whether there was anything."""
        passed, overdue = self._gate.passed(), self._gate.overdue()
        for layer in passed:
            self._release(layer)
        for request_key, error in overdue.items():
            self._fail(request_key, error)
        return bool(passed or overdue)

    def forget_session(self, session_id: str) -> None:
        for prompt in self._by_key.values():
            prompt.transfers = [transfer for transfer in prompt.transfers if transfer.session_id != session_id]

    def close(self, request_key: int) -> None:
        """Close the request's transfers and forget it, for good."""
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
