"""List of all kernels, and of the kernels that a model calls."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from engine.core.numerics import WeightFormat
from engine.kernels.host.attention import mla, paged_attention, sparse_index
from engine.kernels.host.attention.small_batch import CHANNELS, most_rows
from engine.kernels.host.codegen import program
from engine.kernels.host.codegen.amx import has_tiles
from engine.kernels.host.codegen.compiled import STORED_AS, has_kernels
from engine.kernels.host.linear import (
    int4,
    int4_weights,
    int8,
    low_rank,
    packed_linear_kernel,
    packing,
)
from engine.kernels.host.recurrent import causal_conv, delta_rule, gates
from engine.kernels.host.tokens import gating, kv_writes, norm_rope, row_ops, sampling


@dataclass(frozen=True)
class Kernel:
    """A call that compiles a kernel, or loads its cached code."""

    function: Callable[..., object]
    arguments: tuple[object, ...] = ()
    options: dict[str, object] = field(default_factory=dict)

    def load(self) -> None:
        """Load the kernel once for all calls of this process; see `compile_kernel`."""
        self.function(*self.arguments, **self.options)


@dataclass(frozen=True)
class ModelNeeds:
    """The properties of a model that determine its kernels.

    Attributes:
        reads_prompts: the model processes several tokens of a request at a time.
        weight_format: the format of projections.
    """

    dtype: torch.dtype
    reads_prompts: bool
    attends: bool = False
    attends_latent: bool = False
    selects_keys: bool = False
    has_states: bool = False
    weight_format: WeightFormat = WeightFormat.MODEL


def kernels() -> Iterator[Kernel]:
    """Yield all kernels for all dtypes, the slowest to compile first."""
    for dtype in STORED_AS:
        yield from _attention(dtype)
    for dtype, weight_format in itertools.product(STORED_AS, WeightFormat):
        yield _product(dtype, weight_format)
    for dtype, of_one_type in itertools.product(
        STORED_AS,
        (
            delta_rule.chunks_for,
            delta_rule.steps_for,
            sparse_index.scores_for,
            causal_conv.compiled_for,
            causal_conv.trees_for,
            int8.compiled_for,
            int4.compiled_for,
            int4_weights.blocks_for,
            norm_rope.rotation_for,
            norm_rope.tables_for,
            kv_writes.writes_for,
            row_ops.sum_for,
            row_ops.copies_for,
            row_ops.gathers_for,
            gating.gatings_for,
            packing.arranges_for,
            gates.gates_for,
            gates.norm_for,
            gates.heads_for,
            low_rank.update_for,
        ),
    ):
        yield Kernel(of_one_type, (dtype,))
    for dtype, other in itertools.product(STORED_AS, STORED_AS):
        yield Kernel(mla.compiled_for, (dtype, other))
        for rounds_first in (False, True):
            yield Kernel(norm_rope.norm_for, (dtype, other, rounds_first))
    for alone in (
        packing.compiled,
        sparse_index.choice,
        program.load_runner,
        row_ops.moves_for,
        row_ops.maxima,
        sampling.compiled,
    ):
        yield Kernel(alone)


def kernels_of(needs: ModelNeeds) -> Iterator[Kernel]:
    """Yield the kernels that such a model calls, the slowest to compile first.

    They are a part of `kernels()`. Some kernels that compile within half a second are left out.
    """
    dtype = needs.dtype
    if not has_kernels(dtype):
        return
    samples = not needs.reads_prompts
    recurs = needs.has_states
    formats = dict.fromkeys((needs.weight_format, needs.weight_format.of_head))
    called: tuple[tuple[bool, Kernel], ...] = (
        *((needs.attends, kernel) for kernel in _attention(dtype)),
        (recurs and needs.reads_prompts, Kernel(delta_rule.chunks_for, (dtype,))),
        *((True, _product(dtype, each)) for each in formats),
        (needs.attends_latent, Kernel(mla.compiled_for, (dtype, dtype))),
        (recurs and samples, Kernel(delta_rule.steps_for, (dtype,))),
        (recurs, Kernel(causal_conv.compiled_for, (dtype,))),
        (recurs, Kernel(gates.norm_for, (dtype,))),
        (recurs, Kernel(gates.gates_for, (dtype,))),
        (needs.selects_keys, Kernel(sparse_index.scores_for, (dtype,))),
        (needs.selects_keys, Kernel(sparse_index.choice)),
        (True, Kernel(packing.compiled)),
        (True, Kernel(sampling.compiled)),
        (samples, Kernel(program.load_runner)),
        (needs.attends or needs.attends_latent, Kernel(norm_rope.tables_for, (dtype,))),
        (needs.attends, Kernel(kv_writes.writes_for, (dtype,))),
        *(
            (samples, Kernel(kernel, (dtype,)))
            for kernel in (row_ops.sum_for, row_ops.copies_for, row_ops.gathers_for)
        ),
        (WeightFormat.INT8 in formats, Kernel(int8.compiled_for, (dtype,))),
        *(
            (WeightFormat.INT4 in formats, Kernel(kernel, (dtype,)))
            for kernel in (int4.compiled_for, int4_weights.blocks_for)
        ),
    )
    yield from (kernel for is_called, kernel in called if is_called)


def _product(dtype: torch.dtype, weight_format: WeightFormat) -> Kernel:
    return Kernel(packed_linear_kernel.compiled_for, (dtype,), {"weight_format": weight_format})


def _attention(dtype: torch.dtype) -> Iterator[Kernel]:
    tiled = dtype is torch.bfloat16 and has_tiles()
    for few in (False, True) if most_rows(dtype, CHANNELS, tiled=tiled) else (False,):
        yield Kernel(paged_attention.compiled_for, (dtype,), {"tiled": tiled, "few": few})
