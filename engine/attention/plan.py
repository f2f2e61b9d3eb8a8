"""What the CPU backend prepares once per batch: where new keys go, what is read, and who sees what.

Queries are cut into *tiles* (a run of one row's tokens), keys into *blocks* on a grid of absolute positions. Short
tiles of equal length form a group that runs as one sequence of batched products over the group's flat list of blocks;
a short row next to a long one costs nothing, because only blocks that exist are listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.backend import AttentionGeometry
from engine.attention.mask import TreeMask
from engine.batch import ForwardBatch, ForwardMode
from runtime.errors import InternalError

MIN_KEY_BLOCK = 64  # keys per product; smaller pages are joined up to it
MAX_TILE_TOKENS = 128  # bounds the score matrix of a long chunk
_MAX_GROUPED_TOKENS = 32  # longer tiles fill a product on their own


@dataclass(frozen=True)
class TileGroup:
    """Tiles of equal length, run together. G tiles of M tokens, B key blocks in all, at most N per tile.

    tokens        the batch's tokens of these tiles, in order, as [G * M] int64
    pages         [B * pages per block] int64, blocks of a tile in position order
    block_tile    [B] int64, the tile a block belongs to
    block_place   [B] int64, its place in [G * N]
    is_even       whether every tile has N blocks, so that B = G * N
    hidden        bool, True where a key must not be seen. [G, N - first_masked, 1, M, 1, block] for even groups, of the
                  blocks from `first_masked` on (the others are seen by all); else [1, B, ...] with first_masked = 0
    tails         blocks, within B, that end in unwritten keys, and how many of their keys are written
    """

    num_tiles: int
    tile_tokens: int
    max_blocks: int
    tokens: Tensor
    pages: Tensor
    block_tile: Tensor
    block_place: Tensor
    is_even: bool
    first_masked: int
    hidden: Tensor
    tails: tuple[tuple[int, int], ...]


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
    """`first_position` is where its first key is stored; keys 0..num_common-1 are seen by all its tokens."""

    row: int
    first_token: int  # within the batch
    first_position: int
    num_tokens: int
    num_common: int

    @property
    def num_keys(self) -> int:
        return self.first_position + self.num_tokens


def key_block(page_size: int) -> int:
    """Keys per block. Raises InternalError when pages do not fill blocks evenly."""
    if page_size >= MIN_KEY_BLOCK:
        return page_size
    if MIN_KEY_BLOCK % page_size:
        raise InternalError(f"page_size must divide {MIN_KEY_BLOCK} or be at least {MIN_KEY_BLOCK}, got {page_size}")
    return MIN_KEY_BLOCK


def build_plan(batch: ForwardBatch, geometry: AttentionGeometry) -> AttentionPlan:
    """Plan from the batch's host-side lengths, page tables and tree mask.

    Raises:
        InternalError: a tree mask that does not fit its row.
    """
    rows, positions = storage_positions(batch)
    pages = batch.page_tables.long()
    groups: list[list[_Tile]] = []
    by_length: dict[int, list[_Tile]] = {}
    for tile in _tiles(batch):
        if tile.num_tokens > _MAX_GROUPED_TOKENS:
            groups.append([tile])
        else:
            by_length.setdefault(tile.num_tokens, []).append(tile)
    return AttentionPlan(
        geometry=geometry,
        num_rows=batch.num_rows,
        num_tokens=len(positions),
        write_pages=pages[rows, positions // geometry.page_size],
        write_offsets=positions % geometry.page_size,
        groups=tuple(_group(tiles, batch, pages, geometry) for tiles in (*groups, *by_length.values())),
    )


def storage_positions(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Per token its row and where its key is stored: after the row's context, in order (also for trees)."""
    lengths = torch.tensor(batch.query_lens, dtype=torch.long)
    rows = torch.repeat_interleave(torch.arange(batch.num_rows), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    contexts = torch.tensor(batch.context_lens, dtype=torch.long)
    return rows, torch.arange(len(rows)) + (contexts - starts)[rows]


def tree_mask(batch: ForwardBatch) -> TreeMask | None:
    if batch.mode in (ForwardMode.VERIFY, ForwardMode.DRAFT) and isinstance(batch.spec_info, TreeMask):
        return batch.spec_info
    return None


def _tiles(batch: ForwardBatch) -> list[_Tile]:
    tiles, first_token = [], 0
    mask = tree_mask(batch)
    for row, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        if mask is not None and query_len:
            width = _checked_width(mask.visible[row], row, query_len, context_len)
            tiles.append(_Tile(row, first_token, context_len, query_len, context_len + query_len - width))
        else:
            for start in range(0, query_len, MAX_TILE_TOKENS):
                position = context_len + start
                tiles.append(_Tile(row, first_token + start, position, min(MAX_TILE_TOKENS, query_len - start),
                                   position + 1))
        first_token += query_len
    return tiles


def _checked_width(visible: Tensor, row: int, query_len: int, context_len: int) -> int:
    """The number of keys a row's tree mask speaks about."""
    width = visible.shape[1]
    if visible.shape[0] != query_len or not query_len <= width <= context_len + query_len:
        raise InternalError(f"tree mask of row {row} is {tuple(visible.shape)}, the row has {query_len} new tokens and "
                            f"{context_len + query_len} keys")
    if not visible.diagonal(width - query_len).all():
        raise InternalError(f"tree mask of row {row} has a token that does not see itself")
    return width


def _group(tiles: Sequence[_Tile], batch: ForwardBatch, pages: Tensor, geometry: AttentionGeometry) -> TileGroup:
    block = key_block(geometry.page_size)
    pages_per_block = block // geometry.page_size
    counts = [-(-tile.num_keys // block) for tile in tiles]
    max_blocks, is_even = max(counts), len(set(counts)) == 1
    first_masked = min(tile.num_common // block for tile in tiles) if is_even else 0
    block_tile = torch.repeat_interleave(torch.arange(len(tiles)), torch.tensor(counts))
    ends = torch.cumsum(torch.tensor(counts), 0)
    block_index = torch.arange(len(block_tile)) - (ends - torch.tensor(counts))[block_tile]
    rows = torch.tensor([tile.row for tile in tiles])
    table = F.pad(pages, (0, max(0, max_blocks * pages_per_block - pages.shape[1])))
    columns = block_index[:, None] * pages_per_block + torch.arange(pages_per_block)
    tokens = torch.tensor([tile.first_token for tile in tiles])[:, None] + torch.arange(tiles[0].num_tokens)
    masked = block_index >= first_masked
    hidden = _hidden(tiles, batch, block_tile[masked], block_index[masked], block)
    return TileGroup(
        num_tiles=len(tiles),
        tile_tokens=tiles[0].num_tokens,
        max_blocks=max_blocks,
        tokens=tokens.flatten(),
        pages=table[rows[block_tile][:, None], columns].flatten(),
        block_tile=block_tile,
        block_place=block_tile * max_blocks + block_index,
        is_even=is_even,
        first_masked=first_masked,
        hidden=hidden.view(len(tiles) if is_even else 1, -1 if len(hidden) else 0, 1, tiles[0].num_tokens, 1, block),
        tails=tuple((end - 1, (tile.num_keys - 1) % block + 1)
                    for end, tile in zip(ends.tolist(), tiles, strict=True) if tile.num_keys % block),
    )


def _hidden(tiles: Sequence[_Tile], batch: ForwardBatch, block_tile: Tensor, block_index: Tensor,
            block: int) -> Tensor:
    """[blocks, tile tokens, block] bool, True where a token must not see a key."""
    keys = (block_index[:, None] * block + torch.arange(block))[:, None]
    mask = tree_mask(batch)
    if mask is None:
        first = torch.tensor([tile.first_position for tile in tiles])
        own = first[:, None] + torch.arange(tiles[0].num_tokens)
        return keys > own[block_tile][..., None]
    hidden = []
    for index, tile in enumerate(tiles):
        seen = torch.ones(tile.num_tokens, int(keys.max()) + 1, dtype=torch.bool)
        seen[:, tile.num_common : tile.num_keys] = mask.visible[tile.row]
        seen[:, tile.num_keys :] = False
        hidden.append(~seen[:, keys[block_tile == index, 0]].transpose(0, 1))
    return torch.cat(hidden)
