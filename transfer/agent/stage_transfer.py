"""What a `Receiver` and a `Sender` have in common: one epoch of one session on this stage."""

from abc import ABC, abstractmethod
from typing import Protocol

from engine.memory.layout import Buffer, CacheKind, PoolGeometry
from runtime.errors import BatonError
from transfer.plan.handoff_terms import ChunkTiming, DestinationTerms, SourceTerms, StageEndpoint, StageSessionState
from transfer.transport.protocol import Operation, OperationState, Peer, Transport, tag_prefix


class PoolMemory(Protocol):
    """Memory of one stage's pools, on the host or on a device: bytes by layer, kind and index. `engine.memory`
    satisfies it."""

    @property
    def geometry(self) -> PoolGeometry: ...

    def view(self, layer_id: int, kind: CacheKind, first_index: int, count: int) -> Buffer:
        """Where `count` consecutive records (pages or slots) are, no copy: a writable memoryview of host pools, else
        what the stage's transport reaches. Raises InternalError for a layer, kind or index this stage does not have,
        naming it and the stage's range."""
        ...


class StageTransfer(ABC):
    """Belongs to the agent's thread. `state` is OPEN, COMPLETE or FAILED (then `error` is the cause); whether it is
    drained is a separate question: after `stop`, when `num_outstanding` is zero."""

    def __init__(self, source: SourceTerms, destination: DestinationTerms, transport: Transport) -> None:
        self.session_id = destination.session_id
        self.epoch = destination.epoch
        self.tag_prefix = tag_prefix(destination.tag_base)
        self.state = StageSessionState.OPEN
        self.error: BatonError | None = None
        self.is_outcome_reported = False
        self.is_stopped = False
        self.num_bytes = 0
        self._source = source
        self._destination = destination
        self._transport = transport
        self._outstanding: set[Operation] = set()
        self._peers: dict[int, Peer] = {}

    @property
    @abstractmethod
    def writes_memory(self) -> bool:
        """Whether it receives: then two epochs of a session must never overlap."""

    @abstractmethod
    def start(self) -> None:
        """Connect and post. Raises BatonError when the epoch cannot be served; `stop` is still needed."""

    @abstractmethod
    def finished(self, operation: Operation) -> None:
        """An operation of this transfer is DONE, and it is still OPEN. Raises BatonError to fail the transfer."""

    @property
    @abstractmethod
    def peer_stages(self) -> tuple[StageEndpoint, ...]:
        """The stages on the other side, by index."""

    @property
    def chunk_timings(self) -> tuple[ChunkTiming, ...]:
        """What has left so far, by chunk."""
        return ()

    @property
    def num_outstanding(self) -> int:
        """Operations that may still touch pool memory."""
        return len(self._outstanding)

    @property
    def outstanding(self) -> tuple[Operation, ...]:
        return tuple(self._outstanding)

    def on_operation(self, operation: Operation) -> None:
        """One of its operations has ended."""
        self._outstanding.discard(operation)
        if self.is_stopped or self.state is not StageSessionState.OPEN:
            return
        if operation.state is OperationState.DONE:
            self.finished(operation)
        elif operation.error is not None:
            self.fail(operation.error)

    def fail(self, error: BatonError) -> None:
        """No way back; stops by itself. A transfer that is COMPLETE, FAILED or stopped stays what it is."""
        if self.state is StageSessionState.OPEN and not self.is_stopped:
            self.state = StageSessionState.FAILED
            self.error = error
            self.stop()

    def complete(self) -> None:
        self.state = StageSessionState.COMPLETE

    def stop(self) -> None:
        """Start nothing more, cancel what is not matched. Idempotent."""
        self.is_stopped = True
        for operation in self.outstanding:
            self._transport.cancel_receive(operation)

    def connect(self, stage: int) -> Peer:
        """The connection to a stage of the other side, made once."""
        if stage not in self._peers:
            self._peers[stage] = self._transport.connect(self.peer_stages[stage].address)
        return self._peers[stage]


class RefusedTransfer(StageTransfer):
    """An epoch this stage cannot serve: fails as it starts, and touches nothing."""

    def __init__(self, source: SourceTerms, destination: DestinationTerms, transport: Transport,
                 reason: BatonError) -> None:
        super().__init__(source, destination, transport)
        self._reason = reason

    @property
    def writes_memory(self) -> bool:
        return False

    @property
    def peer_stages(self) -> tuple[StageEndpoint, ...]:
        return ()

    def start(self) -> None:
        raise self._reason

    def finished(self, operation: Operation) -> None:
        raise self._reason
