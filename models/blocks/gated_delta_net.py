"""Gated DeltaNet (Yang et al. 2024): a linear recurrence with decay and error-correcting writes.

Per token x, with a short causal convolution before the recurrence:

    q, k, v = split(silu(conv(W_qkv x)));  z = W_z x
    beta = sigmoid(W_b x)                  write strength per value head
    g = -exp(A_log) softplus(W_a x + dt)   log decay per value head
    o = delta_rule(q, k, v, g, beta);      y = W_o (norm(o) silu(z))
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from engine.core.layer_range import ONLY_RANK, Part, TensorRank
from engine.core.numerics import sigmoid, softplus
from engine.kernels.host.codegen.compiled import Team, dense_tokens, has_kernels
from engine.kernels.host.recurrent.gates import delta_gates
from engine.memory.layout import CacheKind, CacheSpec
from models.blocks.config import RawConfig
from models.blocks.norm import GatedRmsNorm
from models.blocks.spec import Mixer, StagePass
from models.blocks.weights import Weights

# Projections of decay and write strength, whose errors accumulate over the tokens.
_GATES = (
    "in_proj_b",
    "in_proj_a",
    "in_proj_ba",
)


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """One Gated DeltaNet layer.

    Each key head serves `num_value_heads / num_key_heads` consecutive value heads. Files store q,
    k, v and z one after another, and also b and a. With `is_interleaved` they store all parts of
    the first key head, then those of the second.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    norm_eps: float
    is_interleaved: bool = False
    rank: TensorRank = ONLY_RANK

    shares_selection = False
    weights_name = "linear_attn"
    chunk_grid = 64  # the chunked form has the same bits only if it is cut on its own grid
    heads_field = "linear_num_key_heads"  # the config field of `num_key_heads`, for messages

    def __post_init__(self) -> None:
        """Check that the ranks can divide it.

        Raises:
            ConfigError: they cannot.
        """
        _ = self.key_heads

    @property
    def key_heads(self) -> Part:
        """Return this rank's key heads."""
        return self.rank.part(
            self.num_key_heads, f"key heads of GatedDeltaNet ({self.heads_field})"
        )

    @property
    def value_heads(self) -> Part:
        """Return this rank's value heads: those that its key heads serve."""
        return self.key_heads.times(self.num_value_heads // self.num_key_heads)

    @property
    def outputs(self) -> tuple[Part, ...]:
        """Return the output values of each rank's value heads."""
        return tuple(
            self.of_rank(rank).value_heads.times(self.value_head_dim) for rank in self.rank.every
        )

    @property
    def conv_blocks(self) -> tuple[int, int, int]:
        """Return the numbers of channels of q, k and v, over all ranks."""
        key_width = self.num_key_heads * self.key_head_dim
        return key_width, key_width, self.num_value_heads * self.value_head_dim

    def of_rank(self, rank: TensorRank) -> "GatedDeltaNetSpec":
        """Implement `MixerSpec.of_rank`."""
        return replace(self, rank=rank)

    def attention_geometry(self, page_size: int) -> None:
        return None

    def cache_specs(
        self, *, layer_id: int, page_size: int, dtype: torch.dtype
    ) -> tuple[CacheSpec, ...]:
        state_shape = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return (
            CacheSpec(
                layer_id=layer_id,
                kind=CacheKind.CONV,
                split_axis=1,
                blocks=self.conv_blocks,
                num_units=self.num_key_heads,
                record_shape=(self.conv_kernel - 1, sum(self.conv_blocks)),
                dtype=str(dtype).split(".")[1],
                item_bytes=dtype.itemsize,
            ),
            CacheSpec(
                layer_id=layer_id,
                kind=CacheKind.STATE,
                record_shape=state_shape,
                dtype="float32",
                item_bytes=4,
                split_axis=0,
                blocks=(self.num_value_heads,),
                num_units=self.num_key_heads,
            ),
        )

    def build(self, weights: Weights, *, layer_id: int) -> Mixer:
        return GatedDeltaNet(spec=self, weights=weights, layer_id=layer_id)


def read_gated_delta_net(
    raw: RawConfig, *, norm_eps: float, is_interleaved: bool = False
) -> GatedDeltaNetSpec:
    """Read the fields of a Gated DeltaNet layer.

    Raises:
        ConfigError: the key heads do not divide the value heads.
    """
    key_heads = raw.integer("linear_num_key_heads")
    value_heads = raw.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise raw.fail(
            "linear_num_key_heads", f"{key_heads} must divide linear_num_value_heads {value_heads}"
        )
    return GatedDeltaNetSpec(
        hidden_size=raw.integer("hidden_size"),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=raw.integer("linear_key_head_dim"),
        value_head_dim=raw.integer("linear_value_head_dim"),
        conv_kernel=raw.integer("linear_conv_kernel_dim", minimum=2),
        norm_eps=norm_eps,
        is_interleaved=is_interleaved,
    )


class GatedDeltaNet:
    """A layer with its four input projections in one product.

    There are two products if only the gates' projections keep all bits. The backend owns the
    convolution and the recurrence, with their states.
    """

    def __init__(self, *, spec: GatedDeltaNetSpec, weights: Weights, layer_id: int) -> None:
        self._spec = spec
        self._layer_id = layer_id
        heads = spec.value_heads
        keys = spec.key_heads.times(spec.key_head_dim)
        values = heads.times(spec.value_head_dim)
        channels = list[Part]()
        for part in (keys, keys, values):
            before = sum(spec.conv_blocks[: len(channels)])
            channels.append(Part(before + part.start, before + part.stop, sum(spec.conv_blocks)))
        width = 2 * len(keys) + len(values)
        self._input_widths = [width, len(values), len(heads), len(heads)]
        inputs = (
            _interleaved_rows(spec)
            if spec.is_interleaved
            else {
                "in_proj_qkv": channels,
                "in_proj_z": [values],
                "in_proj_b": [heads],
                "in_proj_a": [heads],
            }
        )
        gates = [name for name in inputs if weights.weight_format.is_coded and name in _GATES]
        products = [
            (weights, [name for name in inputs if name not in gates]),
            (weights.whole(), gates),
        ]
        self._inputs = [
            kept.linear(*names, rows=[inputs[name] for name in names], in_features=spec.hidden_size)
            for kept, names in products
            if names
        ]
        self._conv = weights.tensor(
            "conv1d.weight", width, 1, spec.conv_kernel, rows=channels
        ).squeeze(1)
        self._decay = -weights.tensor("A_log", len(heads), rows=heads).float().exp()
        self._step_offset = weights.tensor("dt_bias", len(heads), rows=heads).float()
        self._norm = GatedRmsNorm(
            weight=weights.tensor("norm.weight", spec.value_head_dim), eps=spec.norm_eps
        )
        self._output = weights.summed("out_proj", rows=spec.hidden_size, terms=spec.outputs)

    def forward(self, x: Tensor, stage_pass: StagePass) -> Tensor:
        """Implement `Mixer.forward`."""
        projected = [product(x) for product in self._inputs]
        together = projected[0] if len(projected) == 1 else torch.cat(projected, dim=-1)
        mixed, gate, write, step = torch.split(together, self._input_widths, dim=-1)
        decay, strength = gates(step, write, self._decay, self._step_offset)
        heads = delta_heads(
            self._spec, self._layer_id, mixed, self._conv, decay, strength, stage_pass
        )
        heads = self._norm.forward(heads, gate.reshape(heads.shape))
        return self._output(heads.flatten(1))


def gates(step: Tensor, write: Tensor, rates: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log decay and write strength, in the shapes of `step` and `write`, fp32.

    step     [T, H], or [T, H * dk] for a decay per key channel
    write    [T, H]
    rates    [H] fp32
    offsets  the shape of one token's step, fp32
    """
    if step.device.type == "cpu" and has_kernels(step.dtype) and step.dtype == write.dtype:
        return delta_gates(dense_tokens(step), dense_tokens(write), rates, offsets, Team())
    decays = softplus(step.float() + offsets).view(*write.shape, -1) * rates[:, None]
    return decays.view(step.shape), sigmoid(write.float())


def delta_heads(
    spec: GatedDeltaNetSpec,
    layer_id: int,
    mixed: Tensor,
    conv: Tensor,
    g: Tensor,
    beta: Tensor,
    stage_pass: StagePass,
) -> Tensor:
    """Run the convolution and the recurrence of this rank's heads.

    `mixed` is [T, C], their q, k and v; `conv` is [C, kernel]. `g` and `beta` are as in
    `RecurrentBackend.gated_delta_rule`. Return [T, value heads, value_head_dim] fp32.
    """
    batch = stage_pass.batch
    recurrent = stage_pass.context.recurrent
    mixed = recurrent.causal_conv(layer_id, mixed, conv, batch)
    keys = (len(spec.key_heads), spec.key_head_dim)
    values = (len(spec.value_heads), spec.value_head_dim)
    shapes = (keys, keys, values)
    parts = torch.split(mixed, [heads * width for heads, width in shapes], dim=-1)
    query, key, value = (
        part.view(len(part), *shape) for part, shape in zip(parts, shapes, strict=True)
    )
    return recurrent.gated_delta_rule(layer_id, query, key, value, g, beta, batch)


def _interleaved_rows(spec: GatedDeltaNetSpec) -> dict[str, list[Part]]:
    """Return the rows by tensor, kind by kind: first q of all key heads, then k, and so on."""
    served = spec.num_value_heads // spec.num_key_heads
    wide = served * spec.value_head_dim
    return {
        "in_proj_qkvz": _kind_by_kind(
            spec.key_heads, (spec.key_head_dim, spec.key_head_dim, wide, wide)
        ),
        "in_proj_ba": _kind_by_kind(spec.key_heads, (served, served)),
    }


def _kind_by_kind(heads: Part, widths: Sequence[int]) -> list[Part]:
    """Return the rows of a tensor that has, per head, `widths` rows of several kinds."""
    edges = [0, *accumulate(widths)]
    each = edges[-1]
    return [
        Part(head * each + start, head * each + stop, heads.total * each)
        for start, stop in pairwise(edges)
        for head in range(heads.start, heads.stop)
    ]
