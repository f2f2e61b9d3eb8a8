"""Kimi Delta Attention (Kimi Linear, 2025): Gated DeltaNet with a decay per key channel.

Per token x, with a short causal convolution before the recurrence:

    q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))
    beta = sigmoid(W_b x)                            write strength per head
    g = -exp(A_log) softplus(W_fb W_fa x + dt)       log decay per key channel
    o = delta_rule(q, k, v, g, beta);                y = W_o (norm(o) sigmoid(W_gb W_ga x))
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.blocks.config import RawConfig
from models.blocks.gated_delta_net import GatedDeltaNetSpec, delta_heads, gates
from models.blocks.norm import GatedRmsNorm
from models.blocks.spec import Mixer, StagePass
from models.blocks.weights import Weights


@dataclass(frozen=True)
class KimiDeltaSpec(GatedDeltaNetSpec):
    """A layer with as many key heads as value heads, all of one width."""

    weights_name = "self_attn"
    heads_field = "num_heads of linear_attn_config"

    def build(self, weights: Weights, *, layer_id: int) -> Mixer:
        return KimiDelta(spec=self, weights=weights, layer_id=layer_id)


def read_kimi_delta(raw: RawConfig, *, norm_eps: float) -> KimiDeltaSpec:
    heads = raw.integer("linear_num_heads")
    head_dim = raw.integer("linear_head_dim")
    return KimiDeltaSpec(
        hidden_size=raw.integer("hidden_size"),
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_kernel=raw.integer("linear_conv_kernel_dim", minimum=2),
        norm_eps=norm_eps,
    )


class KimiDelta:
    """A layer with q, k, v and the output gate's first projection in one product.

    The projections of decay and write strength keep all bits, because their errors accumulate over
    the tokens.
    """

    def __init__(self, *, spec: KimiDeltaSpec, weights: Weights, layer_id: int) -> None:
        self._spec = spec
        self._layer_id = layer_id
        hidden = spec.hidden_size
        head_dim = spec.value_head_dim
        heads = spec.value_heads
        channels = heads.times(head_dim)
        exact = weights.whole()
        self._input_widths = [3 * len(channels), head_dim]
        self._input = weights.linear(
            "q_proj",
            "k_proj",
            "v_proj",
            "g_a_proj",
            in_features=hidden,
            rows=(channels, channels, channels, head_dim),
        )
        self._gate = weights.linear("g_b_proj", rows=(channels,), in_features=head_dim)
        self._step_widths = [head_dim, len(heads)]
        self._step = exact.linear("f_a_proj", "b_proj", rows=(head_dim, heads), in_features=hidden)
        self._fade = exact.linear("f_b_proj", rows=(channels,), in_features=head_dim)
        self._conv = torch.cat(
            [
                weights.tensor(
                    f"{name}_conv1d.weight", len(channels), 1, spec.conv_kernel, rows=channels
                ).squeeze(1)
                for name in ("q", "k", "v")
            ]
        )
        rates = weights.tensor("A_log", 1, 1, heads.total, 1, dtype=torch.float32)
        self._decay = -rates[0, 0, heads.start : heads.stop, 0].exp()
        self._step_offset = weights.tensor(
            "dt_bias", len(channels), rows=channels, dtype=torch.float32
        )
        self._norm = GatedRmsNorm(
            weight=weights.tensor("o_norm.weight", head_dim), eps=spec.norm_eps, is_silu=False
        )
        self._output = weights.summed("o_proj", rows=hidden, terms=spec.outputs)

    def forward(self, x: Tensor, stage_pass: StagePass) -> Tensor:
        """Implement `Mixer.forward`."""
        by_head = (len(x), len(self._spec.value_heads), self._spec.value_head_dim)
        mixed, gate = torch.split(self._input(x), self._input_widths, dim=-1)
        step, write = torch.split(self._step(x), self._step_widths, dim=-1)
        decays, strengths = gates(self._fade(step), write, self._decay, self._step_offset)
        heads = delta_heads(
            self._spec,
            self._layer_id,
            mixed,
            self._conv,
            decays.view(by_head),
            strengths,
            stage_pass,
        )
        heads = self._norm.forward(heads, self._gate(gate).view(by_head))
        return self._output(heads.flatten(1))
