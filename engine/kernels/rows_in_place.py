"""Kernel argument for reading keys in place from their pages."""

from dataclasses import dataclass

from torch import Tensor

NO_WINDOW = 1 << 40  # more than the number of positions


@dataclass(frozen=True)
class RowsInPlace:
    """The R rows of a batch, its T new tokens and the keys that each token sees.

    A token sees the keys 0 .. position, or of these its own and `window` before it. No other keys
    are read.

    Attributes:
        tables: [R, width] int32, the rows' pages.
        tiles: [N, 3] int32: row, first token, number of tokens. Each new token is in one tile,
            ordered by position unless the batch has `paths`.
        positions: [T] int32, the number of keys that the token sees before its own.
        num_in_order: [R] int32, the number of a row's keys that are in the order of positions in
            the row's pages.
        paths: [T, longest] int64, the slots of the token's other keys, by position: page *
            page_size + offset. longest is 0 if all keys are in order.
        longest_tile: the number of tokens of the longest tile; 0 without tiles.
        window: not used together with `paths`.
    """

    tables: Tensor
    tiles: Tensor
    positions: Tensor
    num_in_order: Tensor
    paths: Tensor
    longest_tile: int
    window: int = NO_WINDOW
