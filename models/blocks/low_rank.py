"""Low-rank updates of projections (LoRA): y + scale * B A x for rows of a batch with an adapter.

Every adapter has its own A and B, and a batch mixes rows of many adapters with rows of none. The
product y = W x is computed for all rows as if there were no adapters. Then the updates are added to
their rows. The bits of a row depend on its own values and its own adapter, and not on the other
rows.

    h = A x          [n, r]     rounded to the model's dtype; one launch for adapters of one shape
    y = y + B h      [n, out]   in place, rounded once; another one; B has the scale already
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from threading import get_ident
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import AdapterRun, ForwardBatch
from engine.kernels.host.codegen.compiled import Team, has_kernels
from engine.kernels.host.linear.low_rank import (
    UpFactor,
    add_update,
    update_items,
    update_table,
)
from runtime.errors import InternalError

# Runs of rows, each with the place of its adapter and a number of rows.
Runs = tuple[tuple[int, int], ...]
Product = Callable[[Tensor, Runs], Tensor]
_MAX_TABLES = 16  # of a projection


@dataclass(frozen=True)
class LowRankFactors:
    """The update of one projection by one adapter.

    Attributes:
        down: A, [r, in] fp32.
        up: B times the scale, [out, r] fp32.
        is_swapped: whether they are the transposes of each other's places; None: not known.
    """

    down: Tensor
    up: Tensor
    is_swapped: bool | None = None


class FactorSource(Protocol):
    """The factors of one adapter for the layers of a stage."""

    @property
    def name(self) -> str:
        """Return the adapter's name, for error messages."""
        ...

    def factors(self, module: str) -> LowRankFactors | None:
        """Return the factors of a projection, or None if the adapter does not target it.

        `module` is the projection's name without the model's prefix, such as
        "layers.0.self_attn.q_proj".
        """
        ...

    def skip(self, module: str) -> bool:
        """Leave the factors of a projection to other ranks; return whether there are any."""
        ...

    def finish(self) -> None:
        """Check that every module with factors was asked for.

        Raises:
            ConfigError: the stage has no projection for some of them.
        """
        ...


@dataclass(frozen=True)
class ChosenRows:
    """Tokens of some adapters.

    Attributes:
        index: [n] int64.
        rows: the same memory, for reads that a recording would refuse of a tensor.
        runs: for each run of tokens in `index` the place of its adapter and its length.
        covers_all: `index` is all tokens in their own order.
    """

    index: Tensor
    rows: NDArray[np.int64]
    runs: Runs
    covers_all: bool
    _of_experts: dict[tuple[int, ...], Runs] = field(default_factory=dict, init=False, repr=False)

    def runs_of_experts(self, counts: Sequence[int]) -> Runs:
        """Return runs by adapter and expert, if the rows follow one another by expert.

        `counts` are the rows of each expert. A run's place is adapter * experts + expert.
        """
        key = tuple(counts)
        if key not in self._of_experts:
            expert_of = np.repeat(np.arange(len(counts)), counts)[self.rows]
            adapter_of = np.repeat(*np.array(self.runs).T)
            self._of_experts[key] = runs_of(adapter_of * len(counts) + expert_of)
        return self._of_experts[key]


def runs_of(places: NDArray[np.int64]) -> Runs:
    """Return the runs of equal places, at least one."""
    starts = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
    return tuple((int(places[start]), end - start) for start, end in pairwise(starts))


def index_tensor(rows: NDArray[np.int64]) -> Tensor:
    """Return the rows, at least one, as a tensor over the same memory.

    A recording may use it, because a replay has the same adapters in the same rows.
    """
    return torch.frombuffer(rows, dtype=torch.int64)


class TokenAdapters:
    """The adapter of each token that a projection gets."""

    def __init__(self, ids: Mapping[str, int], of_token: NDArray[np.int64]) -> None:
        """Create it from the numbers of the adapters and, per token, one of them or 0, [T]."""
        self._ids = ids
        self._of_token = of_token
        self._chosen: dict[tuple[str, ...], ChosenRows | None] = {}

    def __len__(self) -> int:
        return len(self._of_token)

    def kept(self, wanted: Tensor | slice) -> "TokenAdapters":
        """Return those of the wanted tokens."""
        places = wanted if isinstance(wanted, slice) else wanted.cpu().numpy()
        return TokenAdapters(self._ids, self._of_token[places])

    def of(self, names: tuple[str, ...]) -> ChosenRows | None:
        """Return the tokens of these adapters; None if there are none.

        If they are all tokens, they keep their order. Otherwise they are ordered by adapter, as in
        `names`.
        """
        if names not in self._chosen:
            self._chosen[names] = self._found(names)
        return self._chosen[names]

    def _found(self, names: tuple[str, ...]) -> ChosenRows | None:
        places = np.full(int(self._of_token.max(initial=0)) + 1, -1)
        for place, name in enumerate(names):
            # An adapter that another thread has just added or removed has no tokens here.
            if 0 < (number := self._ids.get(name, 0)) < len(places):
                places[number] = place
        found = places[self._of_token]
        covers_all = bool(len(found) and found.min() >= 0)
        index = np.arange(len(found)) if covers_all else np.argsort(found, kind="stable")
        index = index[found[index] >= 0]
        if not len(index):
            return None
        return ChosenRows(index_tensor(index), index, runs_of(found[index]), covers_all)


class AdapterRows:
    """The adapters of a stage, and those of the tokens that its projections get now.

    A stage has one, which its projections share. Belongs to the threads that run the stage; others
    may add adapters meanwhile.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._num_ids = 0  # given so far; none is given twice
        # By thread: halves of a batch run in two.
        self._current: dict[int, TokenAdapters | None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the adapters that rows may have, the latest last."""
        return tuple(self._ids)

    def add(self, name: str) -> None:
        """Let rows have the adapter. Any thread."""
        self._num_ids += 1
        self._ids[name] = self._num_ids

    def remove(self, name: str) -> None:
        """Let rows have the adapter no more; no forward with it may run."""
        self._ids.pop(name, None)

    @property
    def current(self) -> TokenAdapters | None:
        """Return the adapters of the tokens that projections get now; None if none has one."""
        return self._current.get(get_ident())

    def of_batch(self, batch: ForwardBatch) -> TokenAdapters | None:
        """Return the adapters of a batch's tokens; None if its rows have none.

        Raises:
            InternalError: a row names an adapter that this stage does not have.
        """
        if not batch.adapters:
            return None
        return self.of_runs(zip(batch.adapters, batch.query_lens, strict=True))

    def of_runs(self, runs: Iterable[AdapterRun]) -> TokenAdapters:
        """Return the adapters of runs of tokens, at least one.

        Raises:
            InternalError: a run names an adapter that this stage does not have.
        """
        names, counts = zip(*runs, strict=True)
        unknown = sorted({name for name in names if name} - self._ids.keys())
        if unknown:
            raise InternalError(f"this stage has no adapters {unknown}")
        ids = [self._ids.get(name, 0) for name in names]
        return TokenAdapters(self._ids, np.repeat(np.array(ids, np.int64), counts))

    @contextmanager
    def having(self, tokens: TokenAdapters | None) -> Iterator[None]:
        """Let projections get these tokens for the length of the block."""
        thread, before = get_ident(), self.current
        self._current[thread] = tokens
        try:
            yield
        finally:
            self._current[thread] = before

    def having_only(self, wanted: Tensor) -> AbstractContextManager[None]:
        """Let projections get the wanted ones of the tokens, in that order, as `having` does."""
        tokens = self.current
        return self.having(None if tokens is None else tokens.kept(wanted))

    def keep(self, wanted: Tensor | slice | None) -> None:
        """Reduce the tokens to those that the rest of the block computes; None keeps all."""
        tokens = self.current
        if tokens is not None and wanted is not None:
            self._current[get_ident()] = tokens.kept(wanted)


@dataclass(frozen=True)
class UpdateGroup:
    """The updates of one projection by adapters whose A have one shape.

    `down` multiplies runs of rows by A; the place of an adapter is that in `names`, or of one of its
    experts that of `ChosenRows.runs_of_experts`. `ups` has the parts of the B of each place.
    """

    names: tuple[str, ...]
    down: Product
    ups: tuple[tuple[UpFactor, ...], ...]
    # By runs of rows: decode steps have the same ones many times in a row.
    _tables: dict[Runs, Tensor] = field(default_factory=dict, init=False, repr=False)

    def table(self, runs: Runs) -> Tensor:
        """Return the kernel's table of the parts of B for these runs."""
        if runs not in self._tables:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            self._tables[runs] = update_table(
                [(self._items[place], count) for place, count in runs]
            )
        return self._tables[runs]

    @cached_property
    def _items(self) -> list[NDArray[np.int64]]:
        return [update_items(ups) for ups in self.ups]


class LowRankUpdates:
    """The updates of one projection by all adapters that target it.

    `groups` may be replaced by any thread, also while a forward runs that has none of the adapters
    which change.
    """

    def __init__(self, rows: AdapterRows) -> None:
        self._rows = rows
        self.groups: Sequence[UpdateGroup] = ()

    def touched(self, num_rows: int) -> bool:
        """Return whether the running forward updates any of `num_rows` rows.

        Raises:
            InternalError: the projection got other rows than the tokens of the forward.
        """
        return any(chosen is not None for _, chosen in self._chosen(num_rows))

    def chosen_rows(self, num_rows: int) -> NDArray[np.bool_]:
        """Return for each row whether an adapter updates it, [num_rows] bool; raise as `touched`."""
        found = np.zeros(num_rows, bool)
        for _, chosen in self._chosen(num_rows):
            if chosen is not None:
                found[chosen.rows] = True
        return found

    def add(self, y: Tensor, x: Tensor, experts: Sequence[int] | None = None) -> Tensor:
        """Add the updates to `y` [T, out], and return it. `x` is the projection's input [T, in].

        `experts` are the numbers of rows of each expert, if the projection is one of experts.
        """
        for group, chosen in self._chosen(len(x)):
            if chosen is None:
                continue
            runs = chosen.runs if experts is None else chosen.runs_of_experts(experts)
            h = group.down(x if chosen.covers_all else x[chosen.index], runs)
            if y.device.type == "cpu" and y.dtype is h.dtype and has_kernels(h.dtype):
                add_update(y, h, chosen.index, group.table(runs), Team())
            else:
                _add_plainly(y, h, chosen.index, runs, group.ups)
        return y

    def _chosen(self, num_rows: int) -> list[tuple[UpdateGroup, ChosenRows | None]]:
        """Return the groups with their rows of the running forward; raise as `touched`."""
        tokens = self._rows.current
        if tokens is None:
            return []
        if num_rows != len(tokens):
            raise InternalError(
                f"a projection of {num_rows} rows in a forward of {len(tokens)} tokens with adapters"
            )
        return [(group, tokens.of(group.names)) for group in self.groups]


def untouched_rows(updates: Sequence[LowRankUpdates], num_rows: int) -> NDArray[np.int64] | None:
    """Return the rows, [n], that no adapter updates; None if no row is updated."""
    found = [each for each in updates if each.touched(num_rows)]
    if not found:
        return None
    chosen = np.logical_or.reduce([each.chosen_rows(num_rows) for each in found])
    return np.flatnonzero(~chosen)


def _add_plainly(
    y: Tensor, h: Tensor, index: Tensor, runs: Runs, ups: Sequence[Sequence[UpFactor]]
) -> None:
    """Add the updates in the order of sums of the kernel, or on a device by its library."""
    for (place, _), rows, part in zip(
        runs,
        torch.split(index.to(y.device), [count for _, count in runs]),
        torch.split(h, [count for _, count in runs]),
        strict=True,
    ):
        for matrix, first_term, first_output in ups[place]:
            terms = part[:, first_term : first_term + len(matrix)]
            if y.device.type == "cpu":
                sums = torch.zeros(len(terms), matrix.shape[1])
                for term in range(len(matrix)):
                    sums += terms[:, term : term + 1].float() * matrix[term].float()
            else:
                sums = (terms @ matrix).float()
            outputs = slice(first_output, first_output + matrix.shape[1])
            y[rows, outputs] = (y[rows, outputs].float() + sums).to(y.dtype)
