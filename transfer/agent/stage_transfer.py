"""One epoch of one session on this stage: the common base, and the receiving side.

`sender.py` has the sending side.
"""

from abc import ABC, abstractmethod
from typing import Protocol

from engine.memory.layout import Buffer, CacheKind, PoolGeometry
from runtime.errors import BatonError, IntegrityError
from transfer.plan.copy_plan import Lane
from transfer.plan.handoff_terms import (
    ChunkTiming,
    DestinationTerms,
    SourceTerms,
    StageEndpoint,
    StageSessionState,
)
from transfer.plan.item_seals import LaneSeals, differing
from transfer.transport.protocol import Operation, OperationState, Peer, Transport, tag_prefix


class PoolMemory(Protocol):
    """Memory of one stage's pools, on the host or on a device: bytes by layer, kind and index.

    `engine.memory` implements it.
    """

    @property
    def geometry(self) -> PoolGeometry: ...

    def view(
        self,
        layer_id: int,
        kind: CacheKind,
        first_index: int,
        count: int,
        part: slice | None = None,
    ) -> Buffer:
        """Return the memory of `count` consecutive records (pages or slots), without a copy.

        This is a writable memoryview of host pools, else memory that the stage's transport can
        access. `part` selects bytes of a single record. Raises InternalError for a layer, kind or
        index that this stage does not have, naming it and the stage's range.
        """
        ...


class StageTransfer(ABC):
    """One epoch of a session on this stage. Belongs to the agent's thread.

    `state` is OPEN, COMPLETE or FAILED (`error` is the cause). The transfer is drained, which is a
    separate condition, after `stop` and once `num_outstanding` is zero.
    """

    def __init__(
        self, source: SourceTerms, destination: DestinationTerms, transport: Transport
    ) -> None:
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
        """Return whether this receives; then two epochs of a session must never overlap."""

    @abstractmethod
    def start(self) -> None:
        """Connect and post the operations.

        Raises BatonError if the epoch cannot be served; `stop` is still needed.
        """

    @abstractmethod
    def finished(self, operation: Operation) -> None:
        """Process a DONE operation of this transfer, which is still OPEN.

        Raises BatonError to fail the transfer.
        """

    @property
    @abstractmethod
    def peer_stages(self) -> tuple[StageEndpoint, ...]:
        """Return the stages of the other side, by index."""

    @property
    def chunk_timings(self) -> tuple[ChunkTiming, ...]:
        """Return the timings of the sent chunks."""
        return ()

    @property
    def num_outstanding(self) -> int:
        """Return the number of operations that may still access pool memory."""
        return len(self._outstanding)

    @property
    def outstanding(self) -> tuple[Operation, ...]:
        return tuple(self._outstanding)

    def on_operation(self, operation: Operation) -> None:
        """Process the end of one of this transfer's operations."""
        self._outstanding.discard(operation)
        if self.is_stopped or self.state is not StageSessionState.OPEN:
            return
        if operation.state is OperationState.DONE:
            self.finished(operation)
        elif operation.error is not None:
            self.fail(operation.error)

    def fail(self, error: BatonError) -> None:
        """Fail the transfer permanently and stop it.

        A transfer that is COMPLETE, FAILED or stopped does not change.
        """
        if self.state is StageSessionState.OPEN and not self.is_stopped:
            self.state = StageSessionState.FAILED
            self.error = error
            self.stop()

    def complete(self) -> None:
        self.state = StageSessionState.COMPLETE

    def stop(self) -> None:
        """Start no more operations and cancel unmatched ones. Idempotent."""
        self.is_stopped = True
        for operation in self.outstanding:
            self._transport.cancel_receive(operation)

    def connect(self, stage: int) -> Peer:
        """Return the connection to a stage of the other side, which is created once."""
        if stage not in self._peers:
            self._peers[stage] = self._transport.connect(self.peer_stages[stage].address)
        return self._peers[stage]


class RefusedTransfer(StageTransfer):
    """Epoch that this stage cannot serve: it fails when it starts and accesses no memory."""

    def __init__(
        self,
        source: SourceTerms,
        destination: DestinationTerms,
        transport: Transport,
        reason: BatonError,
    ) -> None:
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


class _LaneReceipt:
    """Received messages of one lane."""

    def __init__(self, destination: DestinationTerms, lane: Lane) -> None:
        self.lane = lane
        self.lane_seals = LaneSeals(destination, lane)
        self.trailer = bytearray(self.lane_seals.trailer_bytes)
        self.seals: list[bytes] = [b""] * len(lane.items)
        self.num_missing = len(lane.items) + 1  # including the trailer


class Receiver(StageTransfer):
    """Receiver of all lanes of one epoch on a decode stage.

    It posts receives straight into pool pages and verifies every authenticator. COMPLETE when every
    item of every lane has arrived and matches the authenticator of its source.
    """

    def __init__(
        self,
        source: SourceTerms,
        destination: DestinationTerms,
        lanes: tuple[Lane, ...],
        *,
        memory: PoolMemory,
        transport: Transport,
    ) -> None:
        super().__init__(source, destination, transport)
        self._memory = memory
        self._receipts = [_LaneReceipt(destination, lane) for lane in lanes]
        self._by_operation: dict[Operation, tuple[_LaneReceipt, int]] = {}
        self._num_open_lanes = len(lanes)

    @property
    def writes_memory(self) -> bool:
        return True

    @property
    def peer_stages(self) -> tuple[StageEndpoint, ...]:
        return self._source.stages

    def start(self) -> None:
        # Create all views first: a plan with indices outside the pools fails before any receive is
        # posted.
        views = [
            [
                self._memory.view(
                    item.layer_id, item.kind, item.dest_index, item.num_records, item.dest_part
                )
                for item in receipt.lane.items
            ]
            for receipt in self._receipts
        ]
        for receipt, buffers in zip(self._receipts, views, strict=True):
            peer = self.connect(receipt.lane.source_stage)
            for index, buffer in enumerate([*buffers, memoryview(receipt.trailer)]):
                operation = self._transport.post_receive(peer, receipt.lane.tag(index), buffer)
                self._outstanding.add(operation)
                self._by_operation[operation] = (receipt, index)
        if not self._receipts:
            self.complete()

    def finished(self, operation: Operation) -> None:
        receipt, index = self._by_operation.pop(operation)
        if index < len(receipt.lane.items):
            # The bytes are still in this core's cache, so the check is several times cheaper now
            # than later.
            receipt.seals[index] = receipt.lane_seals.seal(operation.content, index)
            self.num_bytes += operation.num_bytes
        receipt.num_missing -= 1
        if receipt.num_missing == 0:
            self._check(receipt)
            self._num_open_lanes -= 1
            if self._num_open_lanes == 0:
                self.complete()

    def stop(self) -> None:
        super().stop()
        # Messages still in flight are discarded on arrival, so that their sends end too.
        self._transport.retire(self.tag_prefix)

    def _check(self, receipt: _LaneReceipt) -> None:
        """Verify a lane. Raises IntegrityError naming the first item that differs."""
        where = f"from source stage {receipt.lane.source_stage}, session {self.session_id} epoch {self.epoch}"
        expected = receipt.lane_seals.unpack_trailer(receipt.trailer)
        if expected is None:
            raise IntegrityError(f"the list of authenticators {where} is not what was sent")
        wrong = differing(receipt.seals, expected)
        if wrong:
            raise IntegrityError(
                f"{receipt.lane.items[wrong[0]].name} {where}: the bytes that arrived are not the "
                f"bytes that were sent ({len(wrong)} of {len(expected)} items differ)"
            )
