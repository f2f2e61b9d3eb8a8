"""The worker's end of a router's call: a simulation of `pool.request.router_call` without tasks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.protobuf.message import Message

from protos import decode_pb2, prefill_pb2, types_pb2
from runtime.errors import BatonError, InternalError
from runtime.rpc.status import failure_of
from sim.network import SimulatedCall

InputT = TypeVar("InputT", prefill_pb2.PrefillInput, decode_pb2.DecodeInput)
EventT = TypeVar("EventT", prefill_pb2.PrefillEvent, decode_pb2.DecodeEvent)


def _ignore(*_: object) -> None:
    """Ignore an event without a listener."""


@dataclass(eq=False)
class SimulatedRequest(Generic[InputT, EventT]):
    """One request of a router, from its opening to its end. Its worker listens, sends and ends."""

    key: int
    _send: Callable[[EventT], None]
    _forget: Callable[[types_pb2.RequestEnded], None]
    on_input: Callable[[InputT], None] = _ignore
    on_gone: Callable[[], None] = _ignore  # cancelled, router lost, or this process died

    def send(self, event: EventT) -> None:
        """Send an event to the router."""
        event.key = self.key
        self._send(event)

    def end(self, error: BatonError | None = None) -> None:
        """End the request, successfully or with `error`. Idempotent."""
        self._forget(
            types_pb2.RequestEnded.FromString(b"" if error is None else failure_of(error).status)
        )


@dataclass(eq=False)
class RouterEnd(Generic[InputT, EventT]):
    """The worker's end of one router's call. `opened` gets each request with its first input."""

    call: SimulatedCall
    message_of: Callable[[EventT], Message]
    ended: Callable[[int, types_pb2.RequestEnded], EventT]
    opened: Callable[[SimulatedRequest[InputT, EventT], InputT], None]
    _requests: dict[int, SimulatedRequest[InputT, EventT]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.call.on_gone = self._gone

    def received(self, message: InputT) -> None:
        """Handle one input of the router."""
        request = self._requests.get(message.key)
        match message.WhichOneof("input"):
            case "open":
                self._open(message)
            case "cancelled":
                if self._requests.pop(message.key, None) is not None and request is not None:
                    request.on_gone()
            case _:
                if request is not None:
                    request.on_input(message)

    def _open(self, message: InputT) -> None:
        key = message.key
        if key in self._requests:
            raise InternalError(f"a router has opened {key} twice")
        request: SimulatedRequest[InputT, EventT] = SimulatedRequest(
            key,
            lambda event: self.call.send(self.message_of(event)),
            lambda ended: self._end(key, ended),
        )
        self._requests[key] = request
        self.opened(request, message)

    def _end(self, key: int, ended: types_pb2.RequestEnded) -> None:
        if self._requests.pop(key, None) is not None:
            self.call.send(self.message_of(self.ended(key, ended)))

    def _gone(self) -> None:
        requests = self._requests
        self._requests = {}
        for request in requests.values():
            request.on_gone()
