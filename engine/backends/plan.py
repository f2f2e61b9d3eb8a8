"""Attention plans of the CPU backend: destinations of new keys, and visible keys of new tokens.

A row's new tokens are cut into *tiles*. Each tile reads the row's keys once per kv head. If order
is not causal (draft trees), a token's own keys are listed as its *path*. They are added up in the
order of plain decoding, which would have stored them consecutively. `tree_visibility` gives every
backend the keys that such a token may see. `check_covered` rejects batches that differ from the
plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.recurrent_batch import StateCopy, batch_parts, state_copies
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo, ancestors
from engine.core.rows import ints
from engine.kernels.rows_in_place import NO_WINDOW, RowsInPlace
from runtime.errors import InternalError, StalePlanError

# Tokens times the heads that share a kv head; the tile's data fits a core's private cache.
MAX_TILE_ROWS = 512
# up to this number a Python list is faster than seven torch operations, each of which releases the
# interpreter lock to other threads
_FEW_TOKENS = 64


@dataclass(frozen=True)
class AttentionPlan:
    """The inputs of `run` besides q, k and v.

    The plan does not change after planning. `parts` holds the plans of sliding-window layers in
    order.
    """

    num_rows: int
    num_tokens: int
    write_pages: Tensor  # [T] int64
    write_offsets: Tensor  # [T] int64
    rows: RowsInPlace
    parts: "tuple[WindowPart, ...]" = ()


@dataclass(frozen=True)
class WindowPart:
    """Tokens of a batch that are on one page of each row.

    After these tokens `copy` saves a row's window for later requests, if it is set.
    """

    tokens: slice
    plan: AttentionPlan
    copy: StateCopy | None


def check_covered(
    batch: ForwardBatch,
    num_planned: tuple[int, int],
    geometry: AttentionGeometry,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> None:
    """Check that the batch, q, k and v have the planned numbers of rows and tokens.

    `num_planned` holds the rows and the tokens of the plan.

    Raises:
        StalePlanError: the batch or a tensor differs from the plan.
    """
    if (batch.num_rows, batch.num_tokens) != num_planned:
        raise StalePlanError(
            f"planned for {num_planned[0]} rows and {num_planned[1]} tokens, the batch has "
            f"{batch.num_rows} and {batch.num_tokens}"
        )
    num_tokens = num_planned[1]
    kv_shape = (num_tokens, geometry.num_kv_heads, geometry.head_dim)
    if (
        q.shape != (num_tokens, geometry.num_heads, geometry.head_dim)
        or not k.shape == v.shape == kv_shape
    ):
        raise StalePlanError(
            f"planned for {num_tokens} tokens of {geometry}, got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )


def build_plan(
    batch: ForwardBatch, geometry: AttentionGeometry, num_pages: int | None
) -> AttentionPlan:
    """Plan from the batch's host-side lengths, page tables and trees.

    `num_pages` is the size of the pools, or None if there are none.

    Raises:
        InternalError: a tree has another size than its row, or a page is outside the pools.
    """
    tables = batch.page_tables.numpy()
    # Compiled code reads any page without a check. As unsigned numbers, negative ids are too large.
    if (
        num_pages is not None
        and tables.size
        and not tables.view(f"u{tables.itemsize}").max() < num_pages
    ):
        raise InternalError(
            f"the pool has {num_pages} pages, the page tables name {tables.tolist()}"
        )
    positions, write_pages, write_offsets = _places(batch, tables, geometry.page_size)
    return AttentionPlan(
        num_rows=batch.num_rows,
        num_tokens=len(positions),
        write_pages=write_pages,
        write_offsets=write_offsets,
        rows=_rows_in_place(batch, geometry, positions),
    )


def window_parts(
    batch: ForwardBatch, geometry: AttentionGeometry, num_slots: int, ring_pages: int
) -> Iterator[WindowPart]:
    """Yield the plans of layers that keep the latest `ring_pages` pages of a row in its slot.

    Page n is record n % ring_pages. The ring has the number of pages that a window can touch, which
    is at least a page of tokens more than the window. So no new page is written before the page
    that it replaces was read. A chain of up to a page of tokens also keeps the window of each token
    intact, whichever of them are accepted.

    Raises:
        InternalError: a slot is outside the pools, or the batch has trees or chains of more than a
            page.
    """
    if batch.mode is ForwardMode.PREBUILT or trees_of(batch) is not None:
        raise InternalError(f"layers that see a window cannot run this {batch.mode} batch")
    is_read = batch.mode is ForwardMode.PREFILL
    if not is_read and max(batch.query_lens, default=0) > geometry.page_size:
        raise InternalError(
            f"chains of {batch.query_lens} tokens, of more than a page of {geometry.page_size}"
        )
    copies = {copy.end: copy for copy in state_copies(batch)}
    cuts = {
        *(_page_ends(batch, geometry.page_size) if is_read else ()),
        *copies,
        batch.num_tokens,
    } - {0}
    for tokens, part in batch_parts(batch, sorted(cuts)):
        longest = max(map(sum, zip(part.context_lens, part.query_lens, strict=True)))
        ring = torch.arange(-(-longest // geometry.page_size)) % ring_pages
        tables = part.slot_ids.long()[:, None] * ring_pages + ring
        plan = build_plan(replace(part, page_tables=tables), geometry, num_slots * ring_pages)
        yield WindowPart(tokens, plan, copies.get(tokens.stop))


def _page_ends(batch: ForwardBatch, page_size: int) -> Iterator[int]:
    """Yield the number of the batch's tokens before each further page of a row."""
    first = 0
    for context_len, query_len in zip(batch.context_lens, batch.query_lens, strict=True):
        yield from range(first + page_size - context_len % page_size, first + query_len, page_size)
        first += query_len


def _places(
    batch: ForwardBatch, tables: NDArray[np.integer[Any]], page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the destination of each token's key, all [T].

    These are its position in the row (int32), and page and offset (int64).
    """
    if batch.num_tokens > _FEW_TOKENS:
        of_tokens, positions = storage_positions(batch)
        return (
            positions.int(),
            batch.page_tables[of_tokens, positions // page_size].long(),
            positions % page_size,
        )
    rows = [row for row, query_len in enumerate(batch.query_lens) for _ in range(query_len)]
    places = np.array(
        [
            position
            for context_len, query_len in zip(batch.context_lens, batch.query_lens, strict=True)
            for position in range(context_len, context_len + query_len)
        ],
        np.int64,
    )
    pages, offsets = np.divmod(places, page_size)
    return (
        torch.from_numpy(places.astype(np.int32)),
        torch.from_numpy(tables[rows, pages].astype(np.int64)),
        torch.from_numpy(offsets),
    )


def _rows_in_place(
    batch: ForwardBatch, geometry: AttentionGeometry, positions: Tensor
) -> RowsInPlace:
    num_in_order = ints(
        [sum(lengths) for lengths in zip(batch.context_lens, batch.query_lens, strict=True)]
    )
    paths = torch.empty(len(positions), 0, dtype=torch.long)
    pages = batch.page_tables
    visibility = tree_visibility(batch)
    if visibility:
        num_in_order = ints(batch.context_lens)
        paths = torch.zeros(len(positions), max(batch.query_lens), dtype=torch.long)
        positions = positions.clone()
        start = 0
        for row, visible in enumerate(visibility):
            tokens = slice(start, start + len(visible))
            first = batch.context_lens[row]
            stored = torch.arange(first, first + len(visible))
            slots = (
                pages[row, stored // geometry.page_size].long() * geometry.page_size
                + stored % geometry.page_size
            )
            # Visible tokens first, in storage order, which is by depth in a tree.
            paths[tokens, : len(visible)] = slots[
                visible.logical_not().byte().argsort(dim=1, stable=True)
            ]
            positions[tokens] = (first + visible.sum(1) - 1).int()
            start += len(visible)
    tiles = _tiles(batch, max(1, MAX_TILE_ROWS * geometry.num_kv_heads // geometry.num_heads))
    return RowsInPlace(
        pages.int().contiguous(),
        torch.from_numpy(np.array(tiles, np.int32).reshape(-1, 3)),
        positions,
        num_in_order,
        paths,
        max((count for *_, count in tiles), default=0),
        NO_WINDOW if geometry.window is None else geometry.window,
    )


def _tiles(batch: ForwardBatch, size: int) -> list[tuple[int, int, int]]:
    """Return (row, first token, number of tokens) of the tiles, the costliest first."""
    tiles = []
    first_token = 0
    for row, (query_len, context_len) in enumerate(
        zip(batch.query_lens, batch.context_lens, strict=True)
    ):
        for start in range(0, query_len, size):
            count = min(size, query_len - start)
            tiles.append((count * (context_len + start + count), (row, first_token + start, count)))
        first_token += query_len
    return [tile for _, tile in sorted(tiles, key=_cost, reverse=True)]


def _cost(tile: tuple[int, tuple[int, int, int]]) -> int:
    return tile[0]


def storage_positions(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Return the row of each token and the position of its key.

    Keys are stored after the row's context, in order, also for trees.
    """
    if batch.num_tokens <= _FEW_TOKENS:
        lens = zip(batch.context_lens, batch.query_lens, strict=True)
        places = [
            (row, context_len + offset)
            for row, (context_len, query_len) in enumerate(lens)
            for offset in range(query_len)
        ]
        listed = torch.tensor(places, dtype=torch.long).view(-1, 2)
        return listed[:, 0].contiguous(), listed[:, 1].contiguous()
    lengths = np.array(batch.query_lens, np.int64)
    rows = np.repeat(np.arange(batch.num_rows), lengths)
    starts = lengths.cumsum() - lengths
    contexts = np.array(batch.context_lens, np.int64)
    positions = np.arange(len(rows)) + (contexts - starts)[rows]
    return torch.from_numpy(rows), torch.from_numpy(positions)


def trees_of(batch: ForwardBatch) -> SpecInfo | None:
    """Return the batch's trees if it verifies any that are not chains."""
    info = batch.spec_info
    if batch.mode is not ForwardMode.VERIFY or not isinstance(info, SpecInfo) or info.is_chain:
        return None
    return info


def tree_visibility(batch: ForwardBatch) -> tuple[Tensor, ...]:
    """Return for each row which of its new tokens each of them may see, [N, N] bool.

    The result is empty if the order is causal. All tokens see the keys that were cached before.

    Raises:
        InternalError: a tree has another size than its row.
    """
    info = trees_of(batch)
    return () if info is None else visible_in_trees(info, batch.query_lens)


def visible_in_trees(info: SpecInfo, query_lens: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the visibility of any trees, including chains.

    Raises:
        InternalError: a tree has another size than its row.
    """
    for row, (spec, query_len) in enumerate(zip(info.rows, query_lens, strict=True)):
        if len(spec.parents) != query_len:
            raise InternalError(
                f"the tree of row {row} has {len(spec.parents)} nodes, the row {query_len} new tokens"
            )
    return tuple(_ancestors_visible(row.parents) for row in info.rows)


def _ancestors_visible(parents: tuple[int, ...]) -> Tensor:
    """Return [N, N] bool: each node sees its ancestors and itself."""
    if all(parent < 0 for parent in parents):
        return torch.eye(len(parents), dtype=torch.bool)
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        visible[node, list(ancestors(parents, node))] = True
    return visible
