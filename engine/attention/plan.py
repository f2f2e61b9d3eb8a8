"""What the CPU backend prepares once per batch: where new keys go, what is read, and who sees what.

Queries are cut into *tiles* (a run of one row's tokens), keys into *blocks* on a grid of absolute positions. Tiles of
equal length form a group that runs as one sequence of batched products over the group's flat list of blocks; a short
row next to a long one costs nothing, because only blocks that exist are listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionGeometry
from engine.attention.mask import TreeMask
from engine.batch import ForwardBatch, ForwardMode
from runtime.errors import InternalError

MIN_KEY_BLOCK = 64  # keys per product; smaller pages are joined up to it
MAX_TILE_TOKENS = 128  # bounds the score matrix of a long chunk


@dataclass(frozen=True)
class TileGroup:
    """Tiles of equal length, run together. G tiles of M tokens, B key blocks in all, P pages per block.

    token_index  [G * M] int64, the batch's tokens of these tiles
    pages        [B * P] int64 page ids
    block_tile   [B] int64, the tile a block belongs to
    block_slot   [B] int64, tile * max_blocks + index of the block within its tile
    hidden       [B, 1, M, 1, block] bool, True where the key must not be seen
    unwritten    int64, flat (block, kv head, key) indices of keys past the last written one
    """

    num_tiles: int
    tile_tokens: int
    max_blocks: int
    token_index: Tensor
    pages: Tensor
    block_tile: Tensor
    block_slot: Tensor
    hidden: Tensor
    unwritten: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """Everything `run` needs besides q, k and v. Nothing in it changes after planning."""

    geometry: AttentionGeometry
    num_rows: int
    num_tokens: int
    write_pages: Tensor  # [T] int64
    write_offsets: Tensor  # [T] int64
    groups: tuple[TileGroup, ...]


@dataclass(frozen=True)
class _Tile:
    row: int
    first_token: int  # within the batch
    first_position: int  # where its first key is stored
    num_tokens: int
    num_keys: int  # keys 0..num_keys-1 of the row can be visible


def key_block(page_size: int) -> int:
    """Keys per block. Raises InternalError when pages do not fill blocks evenly."""
    if page_size >= MIN_KEY_BLOCK:
        return page_size
    if MIN_KEY_BLOCK % page_size:
        raise InternalError(f"page_size must divide {MIN_KEY_BLOCK} or be at least {MIN_KEY_BLOCK}, got {page_size}")
    return MIN_KEY_BLOCK


def build_plan(batch: ForwardBatch, geometry: AttentionGeometry) -> AttentionPlan:
    """Plan from the batch's host-side lengths, page tables and tree mask."""
    rows, positions = _storage_positions(batch)
    pages = batch.page_tables.long()
    groups: dict[int, list[_Tile]] = {}
    for tile in _tiles(batch):
        groups.setdefault(tile.num_tokens, []).append(tile)
    return AttentionPlan(
        geometry=geometry,
        num_rows=batch.num_rows,
        num_tokens=len(positions),
        write_pages=pages[rows, positions // geometry.page_size],
        write_offsets=positions % geometry.page_size,
        groups=tuple(_group(tiles, batch, pages, geometry) for tiles in groups.values()),
    )


def _storage_positions(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Per token its row and where its key is stored: after the row's context, in order (also for trees)."""
    lengths = torch.tensor(batch.query_lens, dtype=torch.long)
    rows = torch.repeat_interleave(torch.arange(batch.num_rows), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    contexts = torch.tensor(batch.context_lens, dtype=torch.long)
    return rows, torch.arange(len(rows)) + (contexts - starts)[rows]


def _tiles(batch: ForwardBatch) -> list[_Tile]:
    tiles, first_token = [], 0
    is_tree = _tree_mask(batch) is not None
    for row, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        step = query_len if is_tree else MAX_TILE_TOKENS
        for start in range(0, query_len, max(step, 1)):
            count = min(step, query_len - start)
            tiles.append(_Tile(row, first_token + start, context_len + start, count, context_len + start + count))
        first_token += query_len
    return tiles


def _group(tiles: Sequence[_Tile], batch: ForwardBatch, pages: Tensor, geometry: AttentionGeometry) -> TileGroup:
    block = key_block(geometry.page_size)
    pages_per_block = block // geometry.page_size
    num_blocks = [-(-tile.num_keys // block) for tile in tiles]
    max_blocks = max(num_blocks)
    table = torch.nn.functional.pad(pages, (0, max(0, max_blocks * pages_per_block - pages.shape[1])))
    key_ids = torch.arange(max_blocks * block)
    block_tile: list[int] = []
    block_slot: list[int] = []
    block_pages, hidden, unwritten = [], [], []
    flat_block = 0
    for index, (tile, count) in enumerate(zip(tiles, num_blocks, strict=True)):
        block_pages.append(table[tile.row, : count * pages_per_block])
        block_tile += [index] * count
        block_slot += range(index * max_blocks, index * max_blocks + count)
        tile_hidden = _hidden(tile, batch, key_ids[: count * block])
        hidden.append(tile_hidden.view(tile.num_tokens, count, block).transpose(0, 1))
        first_unwritten = (flat_block + count - 1) * geometry.num_kv_heads * block + tile.num_keys - (count - 1) * block
        tail = torch.arange(count * block - tile.num_keys) + first_unwritten
        unwritten.append((tail + torch.arange(geometry.num_kv_heads)[:, None] * block).flatten())
        flat_block += count
    first_tokens = torch.tensor([tile.first_token for tile in tiles])
    return TileGroup(
        num_tiles=len(tiles),
        tile_tokens=tiles[0].num_tokens,
        max_blocks=max_blocks,
        token_index=(first_tokens[:, None] + torch.arange(tiles[0].num_tokens)).flatten(),
        pages=torch.cat(block_pages),
        block_tile=torch.tensor(block_tile),
        block_slot=torch.tensor(block_slot),
        hidden=torch.cat(hidden)[:, None, :, None, :],
        unwritten=torch.cat(unwritten),
    )


def _tree_mask(batch: ForwardBatch) -> TreeMask | None:
    if batch.mode in (ForwardMode.VERIFY, ForwardMode.DRAFT) and isinstance(batch.spec_info, TreeMask):
        return batch.spec_info
    return None


def _hidden(tile: _Tile, batch: ForwardBatch, key_ids: Tensor) -> Tensor:
    """[tile tokens, keys] bool, True where a token must not see a key."""
    own = tile.first_position + torch.arange(tile.num_tokens)
    mask = _tree_mask(batch)
    if mask is None:
        return key_ids[None, :] > own[:, None]
    visible = mask.visible[tile.row]
    width = visible.shape[1]
    if visible.shape[0] != tile.num_tokens or not tile.num_tokens <= width <= tile.num_keys:
        raise InternalError(f"tree mask of row {tile.row} is {tuple(visible.shape)}, the row has {tile.num_tokens} new "
                            f"tokens and {tile.num_keys} keys")
    if not visible.diagonal(width - tile.num_tokens).all():
        raise InternalError(f"tree mask of row {tile.row} has a token that does not see itself")
    hidden = (key_ids >= tile.num_keys).repeat(tile.num_tokens, 1)
    hidden[:, tile.num_keys - width : tile.num_keys] = ~visible
    return hidden
