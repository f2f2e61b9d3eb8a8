"""One epoch of a session on a prefill stage: sends items straight from pool pages as their layers are done."""

from collections import deque
from collections.abc import Mapping

from transfer.copy_plan import Lane
from transfer.digest import item_digest, pack_trailer
from transfer.flow import Flow
from transfer.memory import PoolMemory
from transfer.terms import Landing, SourceTerms, StageEndpoint
from transfer.transport import Operation, Peer, Transport


class _LaneDispatch:
    """What has left of one lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.views: list[memoryview] = []
        self.digests: list[int] = [0] * len(lane.items)
        self.num_unsent = len(lane.items)


class _ReadyItem:
    """An item whose layer is done, waiting for room in its peer's window."""

    __slots__ = ("_dispatch", "_index", "_sender", "num_bytes", "peer")

    def __init__(self, sender: "Sender", dispatch: _LaneDispatch, index: int, peer: Peer, num_bytes: int) -> None:
        self._sender = sender
        self._dispatch = dispatch
        self._index = index
        self.peer = peer
        self.num_bytes = num_bytes

    def send(self) -> tuple["Sender", list[Operation]]:
        """Digest and send it; no operations if the sender has stopped meanwhile."""
        return self._sender, self._sender.send_item(self._dispatch, self._index, self.peer)


class Sender(Flow):
    """COMPLETE when every byte of every lane has left. `Outbox` decides when a ready item is sent."""

    def __init__(self, source: SourceTerms, landing: Landing, lanes: tuple[Lane, ...], *, memory: PoolMemory,
                 transport: Transport) -> None:
        super().__init__(source, landing, transport)
        self._memory = memory
        self._dispatches = [_LaneDispatch(lane) for lane in lanes]
        self._num_unfinished = sum(len(lane.items) + 1 for lane in lanes)
        # By layer, what is not ready yet, in the order in which chunks make it ready.
        self._waiting: dict[int, deque[tuple[int, _LaneDispatch, int]]] = {}
        for dispatch in self._dispatches:
            for index, item in enumerate(dispatch.lane.items):
                self._waiting.setdefault(item.layer_id, deque()).append((item.ready_tokens, dispatch, index))
        for layer_id, entries in self._waiting.items():
            self._waiting[layer_id] = deque(sorted(entries, key=lambda entry: entry[0]))

    @property
    def writes_memory(self) -> bool:
        return False

    @property
    def peer_stages(self) -> tuple[StageEndpoint, ...]:
        return self._landing.stages

    def start(self) -> None:
        for dispatch in self._dispatches:
            self.connect(dispatch.lane.dest_stage)
            # A plan that points outside the pools fails here, before anything leaves.
            dispatch.views = [self._memory.view(item.layer_id, item.kind, item.source_index, item.num_records)
                              for item in dispatch.lane.items]
        if not self._dispatches:
            self.complete()

    def release(self, layer_tokens: Mapping[int, int]) -> list[_ReadyItem]:
        """What may leave now that the first `layer_tokens[layer_id]` tokens have passed these layers."""
        ready: list[_ReadyItem] = []
        for layer_id, num_tokens in layer_tokens.items():
            waiting = self._waiting.get(layer_id)
            while waiting and waiting[0][0] <= num_tokens:
                _, dispatch, index = waiting.popleft()
                peer = self.connect(dispatch.lane.dest_stage)
                ready.append(_ReadyItem(self, dispatch, index, peer, dispatch.lane.items[index].num_bytes))
        return ready

    def send_item(self, dispatch: _LaneDispatch, index: int, peer: Peer) -> list[Operation]:
        """Digest one item and send it, with the lane's trailer behind the last."""
        if self.is_stopped:
            return []
        item, tag = dispatch.lane.items[index], dispatch.lane.first_tag + index
        data = dispatch.views[index]
        dispatch.digests[index] = item_digest(data, item, tag)
        operations = [self._transport.send(peer, tag, data)]
        self.num_bytes += item.num_bytes
        dispatch.num_unsent -= 1
        if dispatch.num_unsent == 0:
            trailer = memoryview(pack_trailer(dispatch.lane, dispatch.digests))
            operations.append(self._transport.send(peer, dispatch.lane.trailer_tag, trailer))
        self._outstanding.update(operations)
        return operations

    def finished(self, operation: Operation) -> None:
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            self.complete()


class Outbox:
    """Ready items by peer, in order; a peer that does not take its bytes holds up nobody else.

    At most `window_bytes` (and at least one item) are under way to a peer: enough to keep the connection busy, few
    enough that an abort drains quickly.
    """

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._ready: dict[Peer, deque[_ReadyItem]] = {}
        self._under_way: dict[Peer, int] = {}

    def add(self, items: list[_ReadyItem]) -> None:
        for item in items:
            self._ready.setdefault(item.peer, deque()).append(item)

    def pump(self) -> list[tuple[Sender, list[Operation]]]:
        """Send what the windows have room for."""
        sent = []
        for peer, ready in list(self._ready.items()):
            while ready and (room := self._window_bytes - self._under_way.get(peer, 0)) > 0:
                if ready[0].num_bytes > room and peer in self._under_way:
                    break
                sender, operations = ready.popleft().send()
                for operation in operations:
                    self._under_way[peer] = self._under_way.get(peer, 0) + len(operation.buffer)
                sent.append((sender, operations))
            if not ready:
                del self._ready[peer]
        return sent

    def ended(self, operation: Operation) -> None:
        """A send is over; its bytes leave the window."""
        remaining = self._under_way.get(operation.peer, 0) - len(operation.buffer)
        if remaining > 0:
            self._under_way[operation.peer] = remaining
        else:
            self._under_way.pop(operation.peer, None)
