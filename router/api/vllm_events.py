"""Cache events in the messages of the vLLM engine contract, and the load that goes with them."""

import time
from collections.abc import Sequence

from smg_grpc_proto.generated import common_pb2 as pb

from protos import generation_pb2
from router.api.kv_events import CacheEvent, CacheEventBatch, TokenBlock


def load_to_proto(load: generation_pb2.GetLoadResponse, sample: int) -> pb.EngineLoad:
    """Return the load that goes with events; `sample` grows with every message."""
    return pb.EngineLoad(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests + load.queued_requests,
        waiting_uncached_tokens=load.queued_tokens,
        token_usage=load.kv_utilization,
        max_running_requests=load.max_running_requests,
        sample=sample,
    )


def batch_to_proto(batch: CacheEventBatch, load: pb.EngineLoad | None = None) -> pb.KvEventBatch:
    """Return the message of `SubscribeKvEvents` for a batch."""
    message = pb.KvEventBatch(sequence_number=batch.number, timestamp=time.time(), load=load)
    if batch.clears:
        message.events.add().cleared.SetInParent()
    message.events.extend(map(_event, batch.events))
    if batch.chunk is not None:
        message.snapshot.index = batch.chunk.place
        message.snapshot.count = batch.chunk.num_parts
        message.snapshot.blocks = batch.chunk.num_blocks
    return message


def _event(event: CacheEvent) -> pb.KvCacheEvent:
    if event.is_removal:
        keys = [block.key for block in event.blocks]
        return pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=keys))
    return pb.KvCacheEvent(stored=_stored(event.blocks))


def _stored(blocks: Sequence[TokenBlock]) -> pb.KvBlocksStored:
    parent = blocks[0].parent
    return pb.KvBlocksStored(
        blocks=[
            pb.KvBlock(
                block_hash=block.key, token_ids=block.token_ids, block_size=len(block.token_ids)
            )
            for block in blocks
        ],
        parent_block_hash=None if parent is None else parent.key,
    )
