"""Which kernels there are, and which a model calls."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from engine.kernels.host import (
    causal_conv,
    delta_rule,
    eight_bits,
    gates,
    in_place,
    index_scores,
    latent,
    packing,
    product_kernel,
    program,
    rows,
    token_draws,
    token_passes,
)
from engine.kernels.host.amx import has_tiles
from engine.kernels.host.compiled import STORED_AS, has_kernels
from engine.kernels.host.few_rows import CHANNELS, most_rows


@dataclass(frozen=True)
class Kernel:
    """A call that compiles it, or loads what is kept of it."""

    function: Callable[..., object]
    arguments: tuple[object, ...] = ()
    options: dict[str, object] = field(default_factory=dict)

    def load(self) -> None:
        """Once for all calls of this process; see `compile_kernel`."""
        self.function(*self.arguments, **self.options)


@dataclass(frozen=True)
class ModelNeeds:
    """What of a model decides which kernels it calls. `reads_prompts`: several tokens of a request at a time;
    `in_bytes`: weights are kept in eight bits."""

    dtype: torch.dtype
    reads_prompts: bool
    attends: bool = False
    attends_latent: bool = False
    selects_keys: bool = False
    has_states: bool = False
    in_bytes: bool = False


def kernels() -> Iterator[Kernel]:
    """All, for all types; those that take longest come first."""
    for dtype in STORED_AS:
        yield from _attention(dtype)
    for dtype, in_bytes in itertools.product(STORED_AS, (False, True)):
        yield Kernel(product_kernel.compiled_for, (dtype,), {"in_bytes": in_bytes})
    for dtype, of_one_type in itertools.product(STORED_AS, (
            delta_rule.chunks_for, delta_rule.steps_for, index_scores.scores_for, causal_conv.compiled_for,
            causal_conv.trees_for, eight_bits.compiled_for, token_passes.rotation_for, token_passes.tables_for,
            token_passes.writes_for, rows.sum_for, rows.copies_for, rows.gathers_for, packing.arranges_for,
            gates.gates_for, gates.norm_for, gates.heads_for)):
        yield Kernel(of_one_type, (dtype,))
    for dtype, other in itertools.product(STORED_AS, STORED_AS):
        yield Kernel(latent.compiled_for, (dtype, other))
        for rounds_first in (False, True):
            yield Kernel(token_passes.norm_for, (dtype, other, rounds_first))
    for alone in (packing.compiled, index_scores.choice, program.load_runner, rows.moves_for,
                  rows.maxima, token_draws.compiled):
        yield Kernel(alone)


def kernels_of(needs: ModelNeeds) -> Iterator[Kernel]:
    """Those that such a model calls, a part of `kernels()`, but for some that compile within half a second; those that
    take longest come first."""
    dtype = needs.dtype
    if not has_kernels(dtype):
        return
    draws, recurs = not needs.reads_prompts, needs.has_states
    called: tuple[tuple[bool, Kernel], ...] = (
        *((needs.attends, kernel) for kernel in _attention(dtype)),
        (recurs and needs.reads_prompts, Kernel(delta_rule.chunks_for, (dtype,))),
        (True, Kernel(product_kernel.compiled_for, (dtype,), {"in_bytes": needs.in_bytes})),
        (needs.attends_latent, Kernel(latent.compiled_for, (dtype, dtype))),
        (recurs and draws, Kernel(delta_rule.steps_for, (dtype,))),
        (recurs, Kernel(causal_conv.compiled_for, (dtype,))),
        (recurs, Kernel(gates.norm_for, (dtype,))),
        (recurs, Kernel(gates.gates_for, (dtype,))),
        (needs.selects_keys, Kernel(index_scores.scores_for, (dtype,))),
        (needs.selects_keys, Kernel(index_scores.choice)),
        (True, Kernel(packing.compiled)),
        (True, Kernel(token_draws.compiled)),
        (draws, Kernel(program.load_runner)),
        (needs.attends or needs.attends_latent, Kernel(token_passes.tables_for, (dtype,))),
        (needs.attends, Kernel(token_passes.writes_for, (dtype,))),
        *((draws, Kernel(kernel, (dtype,))) for kernel in (rows.sum_for, rows.copies_for, rows.gathers_for)),
        (needs.in_bytes, Kernel(eight_bits.compiled_for, (dtype,))),
    )
    yield from (kernel for is_called, kernel in called if is_called)


def _attention(dtype: torch.dtype) -> Iterator[Kernel]:
    tiled = dtype is torch.bfloat16 and has_tiles()
    for few in (False, True) if most_rows(dtype, CHANNELS, tiled=tiled) else (False,):
        yield Kernel(in_place.compiled_for, (dtype,), {"tiled": tiled, "few": few})
