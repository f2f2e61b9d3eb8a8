"""Low-rank updates of projections (LoRA): y + scale * B A x for rows of a batch with an adapter.

Every adapter has its own A and B, and a batch mixes rows of many adapters with rows of none. The
product W x is computed for all rows as if there were no adapters. Then each update is added to its
rows: A x is rounded to the model's dtype, B (A x) as well, and their sum with W x once more. The
bits of a row depend on its own values and its own adapter, and not on the other rows.

    h = A x          [n, r]     one launch for all adapters of one shape
    y = y + B h      [n, out]   another one; B has the scale already
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import ForwardBatch
from runtime.errors import InternalError

Product = Callable[[Tensor, Sequence[int]], Tensor]


@dataclass(frozen=True)
class LowRankFactors:
    """The update of one projection by one adapter.

    Attributes:
        down: A, [r, in] fp32.
        up: B times the scale, [out, r] fp32.
    """

    down: Tensor
    up: Tensor


class FactorSource(Protocol):
    """The factors of the adapters of a stage."""

    def factors(self, module: str) -> Mapping[str, LowRankFactors]:
        """Return the factors of a projection by adapter; empty if no adapter targets it.

        `module` is the projection's name without the model's prefix, such as
        "layers.0.self_attn.q_proj".
        """
        ...


@dataclass(frozen=True)
class ChosenRows:
    """Tokens ordered by adapter.

    Attributes:
        index: [n] int64.
        counts: the number of tokens of each adapter; sums to n.
        covers_all: `index` is all tokens in their own order.
    """

    index: Tensor
    counts: Sequence[int]
    covers_all: bool


class AdapterRows:
    """The adapter of each token of the forward that runs now.

    A stage has one, which its projections share. `start` begins a forward. Belongs to the thread
    that runs the stage.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        """Create rows of a stage with the adapters `names`."""
        self._ids = {name: number for number, name in enumerate(names, 1)}
        self._of_token: NDArray[np.int64] | None = None
        self._chosen: dict[tuple[str, ...], ChosenRows | None] = {}

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that projections get now; 0 if none has an adapter."""
        return 0 if self._of_token is None else len(self._of_token)

    def start(self, batch: ForwardBatch) -> None:
        """Begin a forward of `batch`.

        Raises:
            InternalError: a row names an adapter that this stage does not have.
        """
        self._chosen.clear()
        self._of_token = None
        if not batch.adapters:
            return
        unknown = sorted({name for name in batch.adapters if name} - self._ids.keys())
        if unknown:
            raise InternalError(f"this stage has no adapters {unknown}")
        ids = [self._ids.get(name, 0) for name in batch.adapters]
        self._of_token = np.repeat(np.array(ids, np.int64), batch.query_lens)

    def keep(self, wanted: Tensor | slice | None) -> None:
        """Reduce the tokens to those that the rest of the forward computes; None keeps all."""
        if self._of_token is None or wanted is None:
            return
        self._of_token = self._of_token[
            wanted if isinstance(wanted, slice) else wanted.cpu().numpy()
        ]
        self._chosen.clear()

    def of(self, names: tuple[str, ...]) -> ChosenRows | None:
        """Return the tokens of these adapters, in the order of `names`; None if there are none."""
        if self._of_token is None:
            return None
        if names not in self._chosen:
            self._chosen[names] = self._found(names, self._of_token)
        return self._chosen[names]

    def _found(self, names: tuple[str, ...], of_token: NDArray[np.int64]) -> ChosenRows | None:
        parts = [np.flatnonzero(of_token == self._ids[name]) for name in names]
        index = np.concatenate(parts)
        if not len(index):
            return None
        covers_all = len(index) == len(of_token) and bool((index[1:] > index[:-1]).all())
        return ChosenRows(torch.from_numpy(index), [len(part) for part in parts], covers_all)


@dataclass(frozen=True)
class UpdateGroup:
    """The updates of one projection by adapters whose factors have one shape.

    `down` and `up` multiply runs of rows, one run per adapter in the order of `names`.
    """

    names: tuple[str, ...]
    down: Product
    up: Product


class LowRankUpdates:
    """The updates of one projection by all adapters that target it."""

    def __init__(self, rows: AdapterRows, groups: Sequence[UpdateGroup]) -> None:
        self._rows = rows
        self._groups = groups

    def touched(self, num_rows: int) -> bool:
        """Return whether the running forward updates any of `num_rows` rows.

        Raises:
            InternalError: the projection got other rows than the tokens of the forward.
        """
        if not self._rows.num_tokens:
            return False
        if num_rows != self._rows.num_tokens:
            raise InternalError(
                f"a projection of {num_rows} rows in a forward of {self._rows.num_tokens} tokens "
                "with adapters"
            )
        return any(self._rows.of(group.names) is not None for group in self._groups)

    def untouched(self) -> Tensor:
        """Return the rows that no adapter updates, [n] int64, in order."""
        chosen = [self._rows.of(group.names) for group in self._groups]
        rest = np.ones(self._rows.num_tokens, bool)
        for each in chosen:
            if each is not None:
                rest[each.index.numpy()] = False
        return torch.from_numpy(np.flatnonzero(rest))

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the updates to `y` [T, out], and return it. `x` is the projection's input [T, in]."""
        if not self.touched(len(x)):
            return y
        for group in self._groups:
            chosen = self._rows.of(group.names)
            if chosen is None:
                continue
            inner = group.down(x if chosen.covers_all else x[chosen.index], chosen.counts)
            update = group.up(inner, chosen.counts)
            if chosen.covers_all:
                y += update
            else:
                y[chosen.index] += update
        return y
