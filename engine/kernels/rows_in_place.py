"""The argument by which kernels read keys from the pages where they lie."""

from dataclasses import dataclass

from torch import Tensor

NO_WINDOW = 1 << 40  # more than there are positions


@dataclass(frozen=True)
class RowsInPlace:
    """The R rows of a batch, its T new tokens and what each of them sees: keys 0 .. position, or of
    these its own and `window` before it; nothing else is read then.

    tables       [R, width] int32, the rows' pages
    tiles        [N, 3] int32: row, first token, number of tokens; each new token is in one tile, in order of position
                 unless the batch has `paths`
    positions    [T] int32, how many keys the token sees before its own
    num_in_order [R] int32, this many of a row's keys lie in the order of positions in the row's
    pages
    paths        [T, longest] int64, where the token's other keys lie, by position: page * page_size + offset; longest
                 is 0 where all keys lie in order
    longest_tile how many tokens the longest tile has; 0 where there are no tiles
    window       not together with `paths`
    """

    tables: Tensor
    tiles: Tensor
    positions: Tensor
    num_in_order: Tensor
    paths: Tensor
    longest_tile: int
    window: int = NO_WINDOW
