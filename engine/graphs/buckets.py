"""The shapes that forwards are captured for, and the padding of a batch to such a shape.

Padding consists of ordinary rows without context. They have tokens and own the null page and the
null slot, so their writes are harmless. Every captured token belongs to a row, real or padding,
because schedules with unused space are a known source of errors in graphs.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode, GraphBucket, SamplingRow
from engine.core.draft_trees import SpecInfo, SpecRow
from engine.core.request import SamplingParams
from engine.memory.layout import NULL_INDEX

_PADDING_ID = -1
# Padding rows sample, so that a captured forward returns logits of every token.
_SAMPLED = SamplingRow(SamplingParams(), position=0)


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, ... and `max_rows` itself."""
    counts = [1]
    while counts[-1] < max_rows:
        counts.append(min(2 * counts[-1], max_rows))
    return tuple(counts)


def decode_buckets(max_rows: int) -> tuple[GraphBucket, ...]:
    """Return the buckets of decode batches, with one token per row."""
    return tuple(GraphBucket(ForwardMode.DECODE, rows) for rows in row_counts(max_rows))


def verify_buckets(max_rows: int, max_nodes: int, *, is_masked: bool) -> tuple[GraphBucket, ...]:
    """Return the buckets of verify batches, with up to `max_nodes` tokens per row."""
    return tuple(
        GraphBucket(ForwardMode.VERIFY, rows, max_nodes, is_masked) for rows in row_counts(max_rows)
    )


def extend_buckets(max_rows: int, max_nodes: int) -> tuple[GraphBucket, ...]:
    """Return the buckets of a draft that follows the accepted nodes, up to `max_nodes` per row."""
    return tuple(GraphBucket(ForwardMode.DRAFT, rows, max_nodes) for rows in row_counts(max_rows))


def bucket_for(batch: ForwardBatch, buckets: Iterable[GraphBucket]) -> GraphBucket | None:
    """Return the bucket that fits the batch with the fewest tokens, then rows.

    Return None if no bucket fits, the batch is planned already, or its rows differ in their work.
    """
    if (
        not batch.needs_forward_metadata_init()
        or batch.scoring
        or batch.adapters
        or not all(batch.query_lens)
        or not batch.num_rows
    ):
        return None
    fitting = [bucket for bucket in buckets if _fits(batch, bucket)]
    return min(fitting, key=lambda bucket: (bucket.num_tokens, bucket.num_rows), default=None)


def pad_batch(batch: ForwardBatch, bucket: GraphBucket) -> ForwardBatch:
    """Return an unmarked batch of the rows of `batch` and padding. All tensors are on the host."""
    lens = _padding_lens(batch, bucket)
    num_tokens = sum(lens)
    num_rows = len(lens)
    width = max([batch.page_tables.shape[1], *lens])
    tables = F.pad(
        batch.page_tables, (0, width - batch.page_tables.shape[1], 0, num_rows), value=NULL_INDEX
    )
    token_ids = None if batch.token_ids is None else _followed(batch.token_ids, num_tokens)
    return ForwardBatch(
        mode=bucket.mode,
        request_keys=(*batch.request_keys, *(_PADDING_ID,) * num_rows),
        query_lens=(*batch.query_lens, *lens),
        context_lens=(*batch.context_lens, *(0,) * num_rows),
        token_ids=token_ids,
        positions=_followed(batch.positions, num_tokens),
        page_tables=tables,
        slot_ids=F.pad(batch.slot_ids, (0, num_rows), value=NULL_INDEX),
        sampling=(*batch.sampling, *(_SAMPLED,) * num_rows),
        spec_info=_padded_trees(batch, lens, bucket) if bucket.mode is ForwardMode.VERIFY else None,
        graph_bucket=bucket,
    )


def padding_alone(bucket: GraphBucket) -> ForwardBatch:
    """Return a batch of padding rows only, to capture a bucket with."""
    none = torch.empty(0, dtype=torch.int64)
    return pad_batch(
        ForwardBatch(
            mode=bucket.mode,
            request_keys=(),
            query_lens=(),
            context_lens=(),
            token_ids=none,
            positions=none,
            page_tables=torch.empty(0, 1, dtype=torch.int32),
            slot_ids=torch.empty(0, dtype=torch.int32),
            sampling=(),
            spec_info=SpecInfo(none, ()),
        ),
        bucket,
    )


def _fits(batch: ForwardBatch, bucket: GraphBucket) -> bool:
    if (
        batch.mode is not bucket.mode
        or batch.num_rows > bucket.max_rows
        or max(batch.query_lens) > bucket.row_tokens
    ):
        return False
    info = batch.spec_info
    return batch.mode is not ForwardMode.VERIFY or (
        isinstance(info, SpecInfo) and (info.is_chain or bucket.is_masked)
    )


def _padding_lens(batch: ForwardBatch, bucket: GraphBucket) -> tuple[int, ...]:
    num_rows = bucket.num_rows - batch.num_rows
    if not num_rows:
        return ()
    each, more = divmod(bucket.num_tokens - batch.num_tokens, num_rows)
    return tuple(each + (row < more) for row in range(num_rows))


def _padded_trees(batch: ForwardBatch, lens: Sequence[int], bucket: GraphBucket) -> SpecInfo:
    """Return `batch`'s trees and padding: roots if the bucket is masked, else chains."""
    info = batch.spec_info
    assert isinstance(info, SpecInfo), "only such batches find a bucket"
    rows = tuple(
        SpecRow((-1,) * count if bucket.is_masked else tuple(range(-1, count - 1)))
        for count in lens
    )
    return SpecInfo(_followed(info.token_ids, sum(lens)), (*info.rows, *rows))


def _followed(values: Tensor, count: int) -> Tensor:
    return F.pad(values, (0, count))
