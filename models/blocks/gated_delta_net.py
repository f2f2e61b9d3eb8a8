"""Gated DeltaNet (Yang et al. 2024): a linear recurrence with decay and error-correcting writes.

Per token x, with a short causal convolution before the recurrence:
    q, k, v = split(silu(conv(W_qkv x)));  z = W_z x
    beta = sigmoid(W_b x)                  write strength per value head
    g = -exp(A_log) softplus(W_a x + dt)   log decay per value head
    o = delta_rule(q, k, v, g, beta);      y = W_o (norm(o) silu(z))
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.core.layer_range import ONLY_RANK, Part, TensorRank
from engine.core.numerics import sigmoid, softplus
from engine.memory.layout import CacheKind, CacheSpec
from models.blocks.config import RawConfig
from models.blocks.norm import GatedRmsNorm
from models.blocks.spec import Mixer, StagePass
from models.blocks.weights import Weights


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """Each key head serves `num_value_heads / num_key_heads` consecutive value heads."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    norm_eps: float
    rank: TensorRank = ONLY_RANK

    shares_selection = False
    weights_name = "linear_attn"
    chunk_grid = 64  # the chunked form is bit-equal only when cut on its own grid

    def __post_init__(self) -> None:
        """Raises ConfigError where the ranks cannot divide it."""
        self.rank.terms(self.num_value_heads * self.value_head_dim, "values of GatedDeltaNet's heads")
        _ = self.key_heads, self.value_heads

    @property
    def key_heads(self) -> Part:
        """This rank's."""
        return self.rank.part(self.num_key_heads, "key heads of GatedDeltaNet")

    @property
    def value_heads(self) -> Part:
        """This rank's: those that its key heads serve."""
        return self.rank.part(self.num_value_heads, "value heads of GatedDeltaNet")

    @property
    def conv_blocks(self) -> tuple[int, int, int]:
        """Channels of q, k and v, of all ranks, one behind the other."""
        key_width = self.num_key_heads * self.key_head_dim
        return key_width, key_width, self.num_value_heads * self.value_head_dim

    def of_rank(self, rank: TensorRank) -> "GatedDeltaNetSpec":
        """See `MixerSpec.of_rank`."""
        return replace(self, rank=rank)

    def attention_geometry(self, page_size: int) -> None:
        return None

    def cache_specs(self, *, layer_id: int, page_size: int, dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        state_shape = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return (
            CacheSpec(layer_id=layer_id, kind=CacheKind.CONV, split_axis=1, blocks=self.conv_blocks,
                      record_shape=(self.conv_kernel - 1, sum(self.conv_blocks)), dtype=str(dtype).split(".")[1],
                      item_bytes=dtype.itemsize),
            CacheSpec(layer_id=layer_id, kind=CacheKind.STATE, record_shape=state_shape, dtype="float32",
                      item_bytes=4, split_axis=0, blocks=(self.num_value_heads,)),
        )

    def build(self, weights: Weights, *, layer_id: int) -> Mixer:
        return GatedDeltaNet(spec=self, weights=weights, layer_id=layer_id)


def read_gated_delta_net(raw: RawConfig, *, norm_eps: float) -> GatedDeltaNetSpec:
    """Raises ConfigError when key heads do not divide the value heads."""
    key_heads, value_heads = raw.integer("linear_num_key_heads", 16), raw.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise raw.fail("linear_num_key_heads", f"{key_heads} must divide linear_num_value_heads {value_heads}")
    return GatedDeltaNetSpec(
        hidden_size=raw.integer("hidden_size"), num_key_heads=key_heads, num_value_heads=value_heads,
        key_head_dim=raw.integer("linear_key_head_dim", 128), value_head_dim=raw.integer("linear_value_head_dim", 128),
        conv_kernel=raw.integer("linear_conv_kernel_dim", 4, minimum=2), norm_eps=norm_eps,
    )


class GatedDeltaNet:
    """All four input projections in one product; the backend owns convolution and recurrence with their states."""

    def __init__(self, *, spec: GatedDeltaNetSpec, weights: Weights, layer_id: int) -> None:
        self._spec = spec
        self._layer_id = layer_id
        heads = spec.value_heads
        keys, values = spec.key_heads.times(spec.key_head_dim), heads.times(spec.value_head_dim)
        self._widths = [len(keys), len(keys), len(values)]
        channels = list[Part]()
        for part in (keys, keys, values):
            before = sum(spec.conv_blocks[:len(channels)])
            channels.append(Part(before + part.start, before + part.stop, sum(spec.conv_blocks)))
        self._input_widths = [sum(self._widths), len(values), len(heads), len(heads)]
        self._input = weights.linear("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a",
                                     rows=(channels, values, heads, heads), in_features=spec.hidden_size)
        self._conv = weights.tensor("conv1d.weight", sum(self._widths), 1, spec.conv_kernel, rows=channels).squeeze(1)
        self._decay = -weights.tensor("A_log", len(heads), rows=heads).float().exp()
        self._step_offset = weights.tensor("dt_bias", len(heads), rows=heads).float()
        self._norm = GatedRmsNorm(weight=weights.tensor("norm.weight", spec.value_head_dim), eps=spec.norm_eps)
        self._output = weights.summed("out_proj", rows=spec.hidden_size, terms=values)

    def forward(self, x: Tensor, stage_pass: StagePass) -> Tensor:
        spec, batch, recurrent = self._spec, stage_pass.batch, stage_pass.context.recurrent
        num_tokens, num_key_heads, num_value_heads = x.shape[0], len(spec.key_heads), len(spec.value_heads)
        mixed, gate, write, step = torch.split(self._input(x), self._input_widths, dim=-1)
        mixed = recurrent.causal_conv(self._layer_id, mixed, self._conv, batch)
        query, key, value = torch.split(mixed, self._widths, dim=-1)
        heads = recurrent.gated_delta_rule(
            self._layer_id,
            query.reshape(num_tokens, num_key_heads, spec.key_head_dim),
            key.reshape(num_tokens, num_key_heads, spec.key_head_dim),
            value.reshape(num_tokens, num_value_heads, spec.value_head_dim),
            self._decay * softplus(step.float() + self._step_offset),
            sigmoid(write.float()),
            batch,
        )
        heads = self._norm.forward(heads, gate.reshape(num_tokens, num_value_heads, spec.value_head_dim))
        return self._output(heads.reshape(num_tokens, -1).to(x.dtype))
