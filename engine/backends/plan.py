"""What the CPU backend prepares once per batch: where new keys go, what is read, and who sees what.

Rows are taken in *groups* of equal query length and similar context, whose keys are gathered together; a row of many
tokens is a group of its own. A group's queries are cut into *tiles*, so that the score matrix of a long chunk stays
small and a tile is multiplied with the keys before its end only.

Tokens that were drawn, or are drafts in a chain, are read *in place* instead, where there is code for it: few queries
to a row do not pay for gathering. So a token's bits depend on whether it is the prompt's; that is why a request that
lost its memory gets its prompt in chunks again, but its output token by token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.kernels.rows_in_place import RowsInPlace
from runtime.errors import ConfigError, InternalError

KEY_STEP = 64  # keys are gathered in multiples of this, whatever the page size
MAX_TILE_TOKENS = 128
_MIN_TILE_TOKENS = 16
_MAX_TILE_SCORES = 1 << 23  # all heads together
_MAX_GROUPED_TOKENS = 32  # longer rows fill a product on their own
_MAX_GROUP_KEYS = 5120  # unless one row has more; what is gathered should still be in the cache when it is read
_MIN_RUN_TOKENS = 8  # on average
_MAX_LENGTH_RATIO = 1.5  # of rows in one group: the shorter are gathered as long as the longest


@dataclass(frozen=True)
class QueryTile:
    """Tokens start..stop-1 of each of the G rows of a group.

    num_keys      how many keys of each row are gathered for it
    records       [G * kv heads * pages] int64, where they are: page * 2 * kv heads + kv head
    first_masked  keys before this one are seen by all its tokens; a multiple of KEY_STEP
    mask          [G, 1, tokens * heads per kv head, num_keys - first_masked], added to scores: -inf where a key must
                  not be seen, else 0
    written       [G, num_keys - first_masked], integers as wide as a score: all bits set where a key is written, else
                  none; None where all are
    """

    start: int
    stop: int
    num_keys: int
    records: Tensor
    first_masked: int
    mask: Tensor
    written: Tensor | None


@dataclass(frozen=True)
class RowGroup:
    """G rows of M new tokens each. `tokens` [G * M] int64 are the rows' tokens within the batch."""

    num_rows: int
    tokens: Tensor
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True)
class PageRun:
    """New tokens of a batch that lie behind each other in one page from `offset` on."""

    page: int
    offset: int
    first_token: int
    num_tokens: int


@dataclass(frozen=True)
class AttentionPlan:
    """Everything `run` needs besides q, k and v. Nothing in it changes after planning. `runs` cover all tokens, or are
    empty where they are so short that writing token by token is quicker. Rows are read in place, or in groups."""

    geometry: AttentionGeometry
    num_rows: int
    num_tokens: int
    write_pages: Tensor  # [T] int64
    write_offsets: Tensor  # [T] int64
    runs: tuple[PageRun, ...]
    groups: tuple[RowGroup, ...]
    in_place: RowsInPlace | None = None


@dataclass(frozen=True)
class _Row:
    """Keys 0..num_common-1 are seen by all of the row's new tokens."""

    index: int
    first_token: int  # within the batch
    context_len: int
    num_tokens: int
    num_common: int

    @property
    def num_keys(self) -> int:
        return self.context_len + self.num_tokens


def key_step(page_size: int) -> int:
    """Keys are gathered in multiples of this. Raises ConfigError when pages do not fit it."""
    if page_size % KEY_STEP and KEY_STEP % page_size:
        raise ConfigError(f"page_size must divide {KEY_STEP} or be a multiple of it, got {page_size}",
                          field="page_size")
    return max(page_size, KEY_STEP)


def build_plan(batch: ForwardBatch, geometry: AttentionGeometry, dtype: torch.dtype, *,
               num_pages: int | None = None) -> AttentionPlan:
    """Plan from the batch's host-side lengths, page tables and tree mask. `dtype` is that of scores. `num_pages` is
    the size of a pool whose pages this batch reads in place.

    Raises:
        InternalError: a page to be read in place that the pool has not.
    """
    rows, positions = storage_positions(batch)
    pages = batch.page_tables.long()
    in_place = None if num_pages is None else _rows_in_place(batch, num_pages)
    grouped = _grouped(_rows(batch)) if in_place is None else []
    return AttentionPlan(
        geometry=geometry,
        num_rows=batch.num_rows,
        num_tokens=len(positions),
        write_pages=pages[rows, positions // geometry.page_size],
        write_offsets=positions % geometry.page_size,
        runs=_runs(batch, geometry.page_size),
        groups=tuple(_group(group, batch, pages, geometry, dtype) for group in grouped),
        in_place=in_place,
    )


def is_read_in_place(batch: ForwardBatch) -> bool:
    """Whether its tokens were drawn, or are drafts in a chain."""
    return batch.mode in (ForwardMode.DECODE, ForwardMode.VERIFY) and batch.num_tokens > 0


def _rows_in_place(batch: ForwardBatch, num_pages: int) -> RowsInPlace:
    tables = batch.page_tables.int().contiguous()
    if not 0 <= tables.min() <= tables.max() < num_pages:  # compiled code would read whatever is there
        raise InternalError(f"the pool has {num_pages} pages, the page tables name {tables.tolist()}")
    starts = torch.tensor([0, *accumulate(batch.query_lens)], dtype=torch.int32)
    return RowsInPlace(starts, torch.tensor(batch.context_lens, dtype=torch.int32), tables)


def _runs(batch: ForwardBatch, page_size: int) -> tuple[PageRun, ...]:
    if batch.num_tokens < _MIN_RUN_TOKENS * batch.num_rows:
        return ()
    runs, first_token = [], 0
    for pages, context_len, query_len in zip(batch.page_tables.tolist(), batch.context_lens, batch.query_lens,
                                             strict=True):
        done = 0
        while done < query_len:
            page, offset = divmod(context_len + done, page_size)
            count = min(page_size - offset, query_len - done)
            runs.append(PageRun(pages[page], offset, first_token + done, count))
            done += count
        first_token += query_len
    return tuple(runs) if batch.num_tokens >= _MIN_RUN_TOKENS * len(runs) else ()


def storage_positions(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Per token its row and where its key is stored: after the row's context, in order (also for trees)."""
    lengths = torch.tensor(batch.query_lens, dtype=torch.long)
    rows = torch.repeat_interleave(torch.arange(batch.num_rows), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    contexts = torch.tensor(batch.context_lens, dtype=torch.long)
    return rows, torch.arange(len(rows)) + (contexts - starts)[rows]


def _rows(batch: ForwardBatch) -> list[_Row]:
    """The rows that bring tokens."""
    rows, first_token = [], 0
    for index, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        if query_len:
            rows.append(_Row(index, first_token, context_len, query_len, context_len + 1))
        first_token += query_len
    return rows


def _grouped(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Long rows alone; of the others those of equal length and similar context together, in batch order."""
    group: list[_Row] = []
    for row in sorted(rows, key=lambda row: (row.num_tokens, row.num_keys), reverse=True):
        if group and not (group[0].num_tokens == row.num_tokens <= _MAX_GROUPED_TOKENS
                          and group[0].num_keys <= _MAX_LENGTH_RATIO * max(row.num_keys, KEY_STEP)
                          and group[0].num_keys * (len(group) + 1) <= _MAX_GROUP_KEYS):
            yield sorted(group, key=lambda row: row.index)
            group = []
        group.append(row)
    if group:
        yield sorted(group, key=lambda row: row.index)


def _group(rows: Sequence[_Row], batch: ForwardBatch, pages: Tensor, geometry: AttentionGeometry,
           dtype: torch.dtype) -> RowGroup:
    tokens = torch.tensor([row.first_token for row in rows])[:, None] + torch.arange(rows[0].num_tokens)
    return RowGroup(
        num_rows=len(rows),
        tokens=tokens.flatten(),
        tiles=tuple(_tiles(rows, pages[[row.index for row in rows]], geometry, dtype)),
    )


def _tiles(rows: Sequence[_Row], pages: Tensor, geometry: AttentionGeometry,
           dtype: torch.dtype) -> Iterator[QueryTile]:
    """`pages`: the rows' page tables."""
    num_tokens, longest = rows[0].num_tokens, max(row.num_keys for row in rows)
    size = min(MAX_TILE_TOKENS, max(_MIN_TILE_TOKENS, _MAX_TILE_SCORES // (geometry.num_heads * longest)))
    if num_tokens <= _MAX_GROUPED_TOKENS:
        size = num_tokens
    step, share = key_step(geometry.page_size), geometry.num_heads // geometry.num_kv_heads
    for start in range(0, num_tokens, size):
        stop = min(start + size, num_tokens)
        num_keys = _round_up(longest - num_tokens + stop, step)
        # Not from the first hidden key on: whole vectors are masked several times as fast.
        first_masked = (min(row.num_common for row in rows) + start) // KEY_STEP * KEY_STEP
        keys = torch.arange(first_masked, num_keys)
        own = torch.tensor([row.context_len for row in rows])[:, None] + torch.arange(start, stop)
        hidden = keys > own[..., None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        yield QueryTile(start, stop, num_keys, _records(pages, num_keys, geometry), first_masked,
                        mask.repeat_interleave(share, 1)[:, None], _written(rows, keys, dtype))


def _records(pages: Tensor, num_keys: int, geometry: AttentionGeometry) -> Tensor:
    """Where the first keys of rows with these page tables are; the null page where a table is too short."""
    num_pages = num_keys // geometry.page_size
    table = F.pad(pages[:, :num_pages], (0, max(0, num_pages - pages.shape[1])))
    heads = torch.arange(geometry.num_kv_heads)[:, None]
    return (table[:, None] * (2 * geometry.num_kv_heads) + heads).flatten()


def _written(rows: Sequence[_Row], keys: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`QueryTile.written` for the masked keys of a tile; all keys before them are written."""
    written = keys < torch.tensor([row.num_keys for row in rows])[:, None]
    return None if written.all() else -written.to(bits_of(dtype))


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """The integer type as wide as a floating-point type."""
    return {2: torch.int16, 4: torch.int32}[dtype.itemsize]


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
