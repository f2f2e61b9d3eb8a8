"""Grouped-query attention over paged K/V, with the variations of the families in scope."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionGeometry
from engine.memory.layout import CacheKind, CacheSpec
from models.blocks.activations import sigmoid
from models.blocks.norm import NormSpec
from models.config import RawConfig
from models.spec import Mixer, StagePass
from models.weights import Weights


@dataclass(frozen=True)
class AttentionSpec:
    """`qk_norm` normalises each head of q and k before rope. With `output_gate` the query projection is twice as
    wide, each head's [query | gate], and the heads' output is multiplied by sigmoid(gate)."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    output_gate: bool = False

    shares_selection = False
    weights_name = "self_attn"
    chunk_grid = 1

    def attention_geometry(self, page_size: int) -> AttentionGeometry:
        return AttentionGeometry(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
                                 page_size=page_size, scale=self.head_dim**-0.5)

    def cache_specs(self, *, layer_id: int, page_size: int, dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        shape = (2, self.num_kv_heads, page_size, self.head_dim)
        return (CacheSpec(layer_id=layer_id, kind=CacheKind.KV, record_shape=shape, dtype=str(dtype).split(".")[1],
                          item_bytes=dtype.itemsize),)

    def build(self, weights: Weights, *, layer_id: int) -> Mixer:
        return Attention(spec=self, weights=weights, layer_id=layer_id)


def read_attention(raw: RawConfig, *, head_dim: int | None = None, qkv_bias: bool = False, output_bias: bool = False,
                   qk_norm: NormSpec | None = None, output_gate: bool = False) -> AttentionSpec:
    """The usual fields. `head_dim` is the default where the config names none, else hidden_size / num_heads.

    Raises:
        ConfigError: a field is missing, or kv heads do not divide the heads.
    """
    hidden_size, num_heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise raw.fail("num_key_value_heads", f"{num_kv_heads} must divide num_attention_heads {num_heads}")
    return AttentionSpec(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads,
                         head_dim=raw.integer("head_dim", head_dim or hidden_size // num_heads), qkv_bias=qkv_bias,
                         output_bias=output_bias, qk_norm=qk_norm, output_gate=output_gate)


class Attention:
    """q, k, v in one product; the backend writes k and v to their pages and attends."""

    def __init__(self, *, spec: AttentionSpec, weights: Weights, layer_id: int) -> None:
        self._spec = spec
        self._layer_id = layer_id
        self._query_width = spec.num_heads * spec.head_dim * (2 if spec.output_gate else 1)
        self._kv_width = spec.num_kv_heads * spec.head_dim
        self._qkv = weights.linear("q_proj", "k_proj", "v_proj", in_features=spec.hidden_size, bias=spec.qkv_bias,
                                   rows=(self._query_width, self._kv_width, self._kv_width))
        self._output = weights.linear("o_proj", rows=(spec.hidden_size,), in_features=spec.num_heads * spec.head_dim,
                                      bias=spec.output_bias)
        if spec.qk_norm is not None:
            self._query_norm = spec.qk_norm.build(weights, "q_norm", spec.head_dim)
            self._key_norm = spec.qk_norm.build(weights, "k_norm", spec.head_dim)

    def forward(self, x: Tensor, stage_pass: StagePass) -> Tensor:
        spec = self._spec
        num_tokens = x.shape[0]
        query, key, value = torch.split(self._qkv(x), [self._query_width, self._kv_width, self._kv_width], dim=-1)
        query = query.view(num_tokens, spec.num_heads, -1)
        query, gate = query[..., :spec.head_dim], query[..., spec.head_dim:]
        key = key.view(num_tokens, spec.num_kv_heads, spec.head_dim)
        value = value.view(num_tokens, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm is not None:
            query, key = self._query_norm.forward(query), self._key_norm.forward(key)
        rotary = stage_pass.rotary_table()
        query, key = rotary.rotate_halves(query), rotary.rotate_halves(key)
        heads = stage_pass.paged_attention().run(self._layer_id, query, key, value, stage_pass.batch)
        if spec.output_gate:
            heads = heads * sigmoid(gate)
        return self._output(heads.reshape(num_tokens, -1))
