"""The division of a product with packed weights into items for threads."""

from functools import lru_cache
from typing import NamedTuple

from engine.kernels.host.codegen import amx
from engine.kernels.host.codegen.amx import LAYOUT_BYTES
from engine.kernels.host.codegen.vectors import BLOCK_STEP_BYTES
from engine.kernels.host.linear.packed_linear_kernel import streams
from engine.kernels.host.linear.packing import Segments
from engine.kernels.host.linear.product_sums import STREAM_ROWS, TILE_ROWS

_GROUP_BLOCKS = 4
# Rows that share a pass over a segment of the weights while it is in the nearest cache.
_CHUNK_ROWS = 48
_CHUNK_TILE_ROWS = 256  # the same for tiles, whose sums then stay in a core's private cache
_ITEMS_PER_THREAD = 4
_SHARE_BYTES = 5 << 18  # of x for tiles: stays in a core's private cache while the weights pass


class ProductPartition(NamedTuple):
    """The division of a product into items."""

    num_items: int
    scratch_bytes: int  # bytes of a thread: the configuration of tiles, then sums
    fields: tuple[int, ...]  # fields of the record, up to `num_groups`


@lru_cache(maxsize=4096)
def share_out(
    num_rows: int,
    num_matrices: int,
    num_blocks: int,
    num_panels: int,
    num_threads: int,
    segments: Segments,
) -> ProductPartition:
    """Divide a product into groups of blocks.

    An item includes all rows if that gives every thread some items; otherwise the rows are divided
    as well.
    """
    tile_rows, tile_blocks, chunk_rows, copy_row_bytes = TILE_ROWS, _GROUP_BLOCKS, _CHUNK_ROWS, 0
    if segments.multiple > 1:
        tile_rows = chunk_rows = amx.MAX_ROWS
    elif num_rows <= STREAM_ROWS and streams(segments.dtype):
        tile_rows, tile_blocks, chunk_rows, copy_row_bytes = (
            STREAM_ROWS,
            1,
            STREAM_ROWS,
            _copy_row_bytes(segments),
        )
    has_many = num_blocks * num_matrices >= _GROUP_BLOCKS * num_threads
    group = _GROUP_BLOCKS if has_many or num_rows > tile_rows else 1
    num_groups, num_chunks = -(-num_blocks // group), -(-num_rows // chunk_rows)
    num_items = num_groups * num_matrices
    chunk_rows = min(chunk_rows, num_rows) if segments.multiple > 1 else -(-num_rows // num_chunks)
    wanted = 1 if num_threads == 1 else max(1, -(-_ITEMS_PER_THREAD * num_threads // num_items))
    share_chunks = -(-num_chunks // min(wanted, num_chunks))
    scratch_bytes = (
        _scratch_bytes(tile_rows, chunk_rows, group, num_panels) + chunk_rows * copy_row_bytes
    )
    return ProductPartition(
        num_items * -(-num_chunks // share_chunks),
        scratch_bytes,
        (
            tile_rows,
            tile_blocks,
            1,
            chunk_rows,
            copy_row_bytes,
            share_chunks,
            group,
            num_groups,
            num_threads,
        ),
    )


def _copy_row_bytes(segments: Segments) -> int:
    """Return the bytes of a copied row.

    It is an odd number of lines, so that the data of all rows in one step fits into a cache.
    """
    return (
        -(-segments.count * segments.steps * segments.row_step_bytes // BLOCK_STEP_BYTES) | 1
    ) * BLOCK_STEP_BYTES


@lru_cache(maxsize=4096)
def share_out_tiles(
    num_rows: int, num_blocks: int, num_panels: int, row_bytes: int, num_threads: int
) -> ProductPartition:
    """Divide a product for many rows and tiles.

    A share of x stays in a core's private cache while all groups pass.
    """
    num_groups, num_chunks = -(-num_blocks // _GROUP_BLOCKS), -(-num_rows // _CHUNK_TILE_ROWS)
    wanted = max(
        -(-_ITEMS_PER_THREAD * num_threads // num_groups), -(-num_rows * row_bytes // _SHARE_BYTES)
    )
    share_chunks = -(-num_chunks // min(wanted, num_chunks))
    return ProductPartition(
        num_groups * -(-num_chunks // share_chunks),
        _scratch_bytes(amx.MAX_ROWS, _CHUNK_TILE_ROWS, _GROUP_BLOCKS, num_panels),
        (
            amx.MAX_ROWS,
            _GROUP_BLOCKS,
            amx.TILE_ROWS,
            _CHUNK_TILE_ROWS,
            0,
            share_chunks,
            _GROUP_BLOCKS,
            num_groups,
            num_threads,
        ),
    )


def _scratch_bytes(tile_rows: int, chunk_rows: int, blocks: int, num_panels: int) -> int:
    return LAYOUT_BYTES + (tile_rows + (2 + num_panels) * chunk_rows) * blocks * BLOCK_STEP_BYTES
