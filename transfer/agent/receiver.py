"""One epoch of a session on a decode stage: posts its receives straight into pool pages and checks every digest."""

from runtime.errors import IntegrityError
from transfer.agent.stage_transfer import PoolMemory, StageTransfer
from transfer.plan.copy_plan import Lane, item_digest, trailer_bytes, unpack_trailer
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms, StageEndpoint
from transfer.transport.protocol import Operation, Transport


class _LaneReceipt:
    """What has arrived of one lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.trailer = bytearray(trailer_bytes(lane))
        self.digests: list[int] = [0] * len(lane.items)
        self.num_missing = len(lane.items) + 1  # with the trailer


class Receiver(StageTransfer):
    """COMPLETE when every item of every lane has landed and matches the digest its source made."""

    def __init__(self, source: SourceTerms, destination: DestinationTerms, lanes: tuple[Lane, ...], *,
                 memory: PoolMemory,
                 transport: Transport) -> None:
        super().__init__(source, destination, transport)
        self._memory = memory
        self._receipts = [_LaneReceipt(lane) for lane in lanes]
        self._by_operation: dict[Operation, tuple[_LaneReceipt, int]] = {}
        self._num_open_lanes = len(lanes)

    @property
    def writes_memory(self) -> bool:
        return True

    @property
    def peer_stages(self) -> tuple[StageEndpoint, ...]:
        return self._source.stages

    def start(self) -> None:
        # Every view first: a plan that points outside the pools fails before anything is posted.
        views = [[self._memory.view(item.layer_id, item.kind, item.dest_index, item.num_records)
                  for item in receipt.lane.items] for receipt in self._receipts]
        for receipt, buffers in zip(self._receipts, views, strict=True):
            peer = self.connect(receipt.lane.source_stage)
            for index, buffer in enumerate([*buffers, memoryview(receipt.trailer)]):
                operation = self._transport.post_receive(peer, receipt.lane.first_tag + index, buffer)
                self._outstanding.add(operation)
                self._by_operation[operation] = (receipt, index)
        if not self._receipts:
            self.complete()

    def finished(self, operation: Operation) -> None:
        receipt, index = self._by_operation.pop(operation)
        if index < len(receipt.lane.items):
            # The bytes are still in the cache of this core: digesting now is several times cheaper than later.
            receipt.digests[index] = item_digest(operation.content, receipt.lane.items[index], operation.tag)
            self.num_bytes += operation.num_bytes
        receipt.num_missing -= 1
        if receipt.num_missing == 0:
            self._check(receipt)
            self._num_open_lanes -= 1
            if self._num_open_lanes == 0:
                self.complete()

    def stop(self) -> None:
        super().stop()
        # What is still on its way is thrown away as it comes, so that its sender's operations end, too.
        self._transport.retire(self.tag_prefix)

    def _check(self, receipt: _LaneReceipt) -> None:
        """Raises IntegrityError naming the first item that differs."""
        where = f"from source stage {receipt.lane.source_stage}, session {self.session_id} epoch {self.epoch}"
        expected = unpack_trailer(receipt.lane, receipt.trailer)
        if expected is None:
            raise IntegrityError(f"the list of digests {where} was damaged on the way")
        wrong = [item for item, ours, theirs in zip(receipt.lane.items, receipt.digests, expected, strict=True)
                 if ours != theirs]
        if wrong:
            raise IntegrityError(f"{wrong[0].name} {where}: the bytes that arrived are not the bytes that were sent "
                                 f"({len(wrong)} of {len(receipt.lane.items)} items differ)")
