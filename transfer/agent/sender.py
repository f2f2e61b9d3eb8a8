"""Sending side of one session epoch on a prefill stage.

Items are sent straight from pool pages as soon as their layers are done.
"""

from collections import deque
from collections.abc import Mapping

from engine.memory.layout import Buffer
from runtime.clock import Clock
from transfer.agent.stage_transfer import PoolMemory, StageTransfer
from transfer.plan.copy_plan import Lane
from transfer.plan.handoff_terms import ChunkTiming, DestinationTerms, SourceTerms, StageEndpoint
from transfer.plan.item_seals import LaneSeals
from transfer.transport.protocol import Operation, Peer, Transport


class ChunkTimingLog:
    """Times at which each chunk was released and sent.

    Traces compare a handoff with the computation that should hide it. There is one log per sender.
    The number of tokens that makes an item ready determines its chunk.
    """

    def __init__(self, clock: Clock, source: SourceTerms) -> None:
        self._clock = clock
        self._source = source
        self._released_s: dict[int, float] = {}  # by chunk
        self._left: dict[int, tuple[int, float]] = {}

    def on_released(self, ready_tokens: int) -> None:
        chunk = (ready_tokens - 1) // self._source.chunk_tokens
        if chunk not in self._released_s:
            self._released_s[chunk] = self._clock.now()

    def on_left(self, ready_tokens: int, num_bytes: int) -> None:
        chunk = (ready_tokens - 1) // self._source.chunk_tokens
        before, _ = self._left.get(chunk, (0, 0.0))
        self._left[chunk] = (before + num_bytes, self._clock.now())

    def chunk_timings(self) -> tuple[ChunkTiming, ...]:
        """Return the timings by position in the prompt."""
        return tuple(
            ChunkTiming(
                min((chunk + 1) * self._source.chunk_tokens, self._source.num_tokens),
                num_bytes,
                self._released_s[chunk],
                left_s,
            )
            for chunk, (num_bytes, left_s) in sorted(self._left.items())
        )


class _LaneDispatch:
    """Progress of one lane. `views` is the memory of its messages: the items, then the trailer."""

    def __init__(self, destination: DestinationTerms, lane: Lane) -> None:
        self.lane = lane
        self.views: list[Buffer] = []
        self.lane_seals = LaneSeals(destination, lane)
        self.seals: list[bytes] = [b""] * len(lane.items)
        self.num_unsealed = len(lane.items)


class _ReadyMessage:
    """Item whose layer is done, or a trailer, that waits for room in its peer's window."""

    __slots__ = ("_dispatch", "_index", "_sender", "num_bytes", "peer")

    def __init__(self, sender: "Sender", dispatch: _LaneDispatch, index: int, peer: Peer) -> None:
        self._sender = sender
        self._dispatch = dispatch
        self._index = index
        self.peer = peer
        self.num_bytes = dispatch.views[index].nbytes

    def send(self) -> tuple["Sender", Operation | None]:
        """Send the message; the operation is None if the sender has stopped meanwhile."""
        return self._sender, self._sender.send(self._dispatch, self._index, self.peer)


class Sender(StageTransfer):
    """Sender of all lanes of one epoch; COMPLETE when every byte of every lane has been sent.

    `window` decides when a ready message is sent.

    The sender computes the authenticator of an item just after its bytes were sent, not before. The
    send has loaded them into this core's cache, so memory is read once, and the first byte does not
    wait for the authenticator.
    """

    def __init__(
        self,
        source: SourceTerms,
        destination: DestinationTerms,
        lanes: tuple[Lane, ...],
        *,
        memory: PoolMemory,
        transport: Transport,
        window: "SendWindow",
        clock: Clock,
    ) -> None:
        super().__init__(source, destination, transport)
        self._log = ChunkTimingLog(clock, source)
        self._memory = memory
        self._window = window
        self._dispatches = [_LaneDispatch(destination, lane) for lane in lanes]
        self._under_way: dict[Operation, tuple[_LaneDispatch, int]] = {}
        self._num_unfinished = sum(len(lane.items) + 1 for lane in lanes)
        self._is_started = False
        # Items by layer that are not ready yet, in the order in which chunks make them ready.
        self._waiting: dict[int, deque[tuple[int, _LaneDispatch, int]]] = {}
        for dispatch in self._dispatches:
            for index, item in enumerate(dispatch.lane.items):
                self._waiting.setdefault(item.layer_id, deque()).append(
                    (item.ready_tokens, dispatch, index)
                )
        for layer_id, entries in self._waiting.items():
            self._waiting[layer_id] = deque(sorted(entries, key=lambda entry: entry[0]))

    @property
    def writes_memory(self) -> bool:
        return False

    @property
    def peer_stages(self) -> tuple[StageEndpoint, ...]:
        return self._destination.stages

    @property
    def chunk_timings(self) -> tuple[ChunkTiming, ...]:
        return self._log.chunk_timings()

    def start(self) -> None:
        for dispatch in self._dispatches:
            self.connect(dispatch.lane.dest_stage)
            # A plan with indices outside the pools fails here, before anything is sent.
            dispatch.views = [
                self._memory.view(
                    item.layer_id, item.kind, item.source_index, item.num_records, item.source_part
                )
                for item in dispatch.lane.items
            ]
        self._is_started = True
        if not self._dispatches:
            self.complete()

    def release(self, layer_tokens: Mapping[int, int]) -> None:
        """Queue the items that are ready after `layer_tokens[layer_id]` tokens of these layers.

        Does nothing if the sender never started (a stale epoch) or has stopped.
        """
        if self.is_stopped or not self._is_started:
            return
        for layer_id, num_tokens in layer_tokens.items():
            waiting = self._waiting.get(layer_id)
            while waiting and waiting[0][0] <= num_tokens:
                ready_tokens, dispatch, index = waiting.popleft()
                self._log.on_released(ready_tokens)
                self._hand_over(dispatch, index)

    def release_all(self) -> None:
        """Queue all items, because the whole prompt has passed every layer."""
        self.release(dict.fromkeys(self._waiting, self._source.num_tokens))

    def send(self, dispatch: _LaneDispatch, index: int, peer: Peer) -> Operation | None:
        """Send one message of a lane; return None if the sender has stopped."""
        if self.is_stopped:
            return None
        operation = self._transport.send(peer, dispatch.lane.tag(index), dispatch.views[index])
        self._under_way[operation] = (dispatch, index)
        self._outstanding.add(operation)
        return operation

    def finished(self, operation: Operation) -> None:
        dispatch, index = self._under_way.pop(operation)
        if index < len(dispatch.lane.items):
            item = dispatch.lane.items[index]
            dispatch.seals[index] = dispatch.lane_seals.seal(operation.content, index)
            self.num_bytes += item.num_bytes
            self._log.on_left(item.ready_tokens, item.num_bytes)
            dispatch.num_unsealed -= 1
            if dispatch.num_unsealed == 0:
                dispatch.views.append(memoryview(dispatch.lane_seals.pack_trailer(dispatch.seals)))
                self._hand_over(dispatch, len(dispatch.lane.items))
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            self.complete()

    def _hand_over(self, dispatch: _LaneDispatch, index: int) -> None:
        self._window.add(
            _ReadyMessage(self, dispatch, index, self.connect(dispatch.lane.dest_stage))
        )


class SendWindow:
    """Queues of ready messages by peer, so that a stalled peer delays no other.

    At most `window_bytes` (and at least one message) are in flight to a peer: enough to keep the
    connection busy, and few enough for an abort to drain quickly.
    """

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._ready: dict[Peer, deque[_ReadyMessage]] = {}
        self._under_way: dict[Peer, int] = {}

    def add(self, message: _ReadyMessage) -> None:
        self._ready.setdefault(message.peer, deque()).append(message)

    def pump(self) -> list[tuple[Sender, Operation]]:
        """Send as many messages as the windows have room for."""
        sent = []
        for peer, ready in list(self._ready.items()):
            while ready and (room := self._window_bytes - self._under_way.get(peer, 0)) > 0:
                if ready[0].num_bytes > room and peer in self._under_way:
                    break
                sender, operation = ready.popleft().send()
                if operation is not None:
                    self._under_way[peer] = self._under_way.get(peer, 0) + operation.num_bytes
                    sent.append((sender, operation))
            if not ready:
                del self._ready[peer]
        return sent

    def ended(self, operation: Operation) -> None:
        """Release the window bytes of a send that has ended."""
        remaining = self._under_way.get(operation.peer, 0) - operation.num_bytes
        if remaining > 0:
            self._under_way[operation.peer] = remaining
        else:
            self._under_way.pop(operation.peer, None)
