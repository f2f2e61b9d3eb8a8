"""Grouped-query attention over paged K/V, with the variations of the supported families."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.core.layer_range import ONLY_RANK, Part, TensorRank
from engine.core.numerics import sigmoid
from engine.kernels.host.codegen.compiled import Team, dense_tokens, has_kernels
from engine.kernels.host.recurrent.gates import gate_heads
from engine.memory.layout import CacheKind, CacheSpec
from models.blocks.config import RawConfig
from models.blocks.linear import Linear
from models.blocks.norm import NormSpec, RmsNorm
from models.blocks.spec import Mixer, StagePass
from models.blocks.weights import Weights
from models.blocks.whole_norm import WholeNorms


class Rotation(Enum):
    """The pairs of head dimensions that rotate together: i and i + dim/2, or 2i and 2i + 1."""

    NONE = "none"  # the layer has no positions
    HALVES = "halves"
    PAIRS = "pairs"


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    `qk_norm` normalizes each head of q and k before rope. With `norms_whole` the norm is over all
    heads of q together, and over all heads of k. `value_norm` normalizes each head of v, without
    weights. With `output_gate` the query projection is twice as wide, [query | gate] per head, and
    the heads' output is multiplied by sigmoid(gate). With `sinks` each head has a learned score
    without a value in its softmax. With `window` a token sees `window` tokens
    before itself, and older ones are not cached. Scores are divided by the root of `score_dim`, or
    of `head_dim` if it is 0. With `keys_are_values` k before norm and rope is also v. `rotation` is
    the way positions are encoded in q and k.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    output_gate: bool = False
    sinks: bool = False
    window: int | None = None
    score_dim: float = 0
    norms_whole: bool = False
    value_norm: NormSpec | None = None
    keys_are_values: bool = False
    rotation: Rotation = Rotation.HALVES
    rank: TensorRank = ONLY_RANK
    kv_heads_field: str = "num_key_value_heads"  # the config field of `num_kv_heads`, for messages

    shares_selection = False
    weights_name = "self_attn"
    chunk_grid = 1

    def __post_init__(self) -> None:
        """Check that the ranks can divide it.

        Raises:
            ConfigError: they cannot.
        """
        _ = self.heads, self.kv_heads

    @property
    def heads(self) -> Part:
        """Return this rank's heads of q, which read its heads of k and v."""
        readers = self.num_heads // self.num_kv_heads
        if self.num_kv_heads >= self.rank.size:
            return self.kv_heads.times(readers)
        what = "heads of attention (num_attention_heads)"
        _ = self.rank.part(self.num_heads, what)  # raises if there are fewer heads than ranks
        start = self.kv_heads.start * readers
        sharing = self.rank.size // self.num_kv_heads
        own = TensorRank(self.rank.rank % sharing, sharing).part(readers, what)
        return Part(start + own.start, start + own.stop, self.num_heads)

    @property
    def outputs(self) -> tuple[Part, ...]:
        """Return the output values of each rank's heads."""
        return tuple(self.of_rank(rank).heads.times(self.head_dim) for rank in self.rank.every)

    @property
    def keys(self) -> tuple[Part, ...]:
        """Return the values of keys that each rank has."""
        return tuple(self.of_rank(rank).kv_heads.times(self.head_dim) for rank in self.rank.every)

    @property
    def kv_heads(self) -> Part:
        """Return the heads of k and v that this rank's queries read.

        If there are fewer heads than ranks, neighboring ranks have the same.
        """
        return self.rank.shared_part(
            self.num_kv_heads, f"heads of keys and values ({self.kv_heads_field})"
        )

    @property
    def scale(self) -> float:
        """Return the factor of scores."""
        return float((self.score_dim or self.head_dim) ** -0.5)

    def of_rank(self, rank: TensorRank) -> "AttentionSpec":
        """Implement `MixerSpec.of_rank`."""
        return replace(self, rank=rank)

    def attention_geometry(self, page_size: int) -> AttentionGeometry:
        return AttentionGeometry(
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            head_dim=self.head_dim,
            page_size=page_size,
            scale=self.scale,
            window=self.window,
        )

    def cache_specs(
        self, *, layer_id: int, page_size: int, dtype: torch.dtype
    ) -> tuple[CacheSpec, ...]:
        kind = CacheKind.KV
        pages = tuple[int, ...]()
        if self.window is not None:
            kind = CacheKind.WINDOW
            pages = (1 + -(-self.window // page_size),)
        shape = (*pages, 2, self.num_kv_heads, page_size, self.head_dim)
        return (
            CacheSpec(
                layer_id=layer_id,
                kind=kind,
                record_shape=shape,
                dtype=str(dtype).split(".")[1],
                item_bytes=dtype.itemsize,
                split_axis=1 + len(pages),
                blocks=(self.num_kv_heads,),
                may_repeat=True,
            ),
        )

    def build(self, weights: Weights, *, layer_id: int) -> Mixer:
        return Attention(spec=self, weights=weights, layer_id=layer_id)


def read_attention(
    raw: RawConfig,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: NormSpec | None = None,
    output_gate: bool = False,
) -> AttentionSpec:
    """Read the usual fields. Without `head_dim`, heads are hidden_size / num_heads wide.

    Raises:
        ConfigError: a field is missing, or the kv heads do not divide the heads.
    """
    hidden_size = raw.integer("hidden_size")
    num_heads = raw.integer("num_attention_heads")
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise raw.fail(
            "num_key_value_heads", f"{num_kv_heads} must divide num_attention_heads {num_heads}"
        )
    return AttentionSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=raw.integer("head_dim", hidden_size // num_heads),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        output_gate=output_gate,
    )


def read_rotating_layers(raw: RawConfig) -> list[bool]:
    """Return for each layer whether it has positions, by `no_rope_layers` if given.

    Otherwise the last layer of each `no_rope_layer_interval` has none.

    Raises:
        ConfigError: fewer layers are named than there are.
    """
    num_layers = raw.integer("num_hidden_layers")
    interval = raw.integer("no_rope_layer_interval")
    listed = raw.integers("no_rope_layers")
    if not listed:
        return [(layer_id + 1) % interval > 0 for layer_id in range(num_layers)]
    if len(listed) < num_layers:
        raise raw.fail(
            "no_rope_layers", f"names {len(listed)} layers, num_hidden_layers is {num_layers}"
        )
    return [value > 0 for value in listed[:num_layers]]


class Attention:
    """An attention layer with q, k, v (and gate) in one product.

    Norm and rope process the heads of q and k together.
    """

    def __init__(self, *, spec: AttentionSpec, weights: Weights, layer_id: int) -> None:
        self._spec = spec
        self._layer_id = layer_id
        self._num_heads, self._num_kv_heads = len(spec.heads), len(spec.kv_heads)
        queries = spec.heads.times(spec.head_dim)
        keys = spec.kv_heads.times(spec.head_dim)
        self._widths = [
            len(queries) + len(keys),
            0 if spec.keys_are_values else len(keys),
            len(queries) if spec.output_gate else 0,
        ]
        if spec.output_gate:
            self._input = _gated_input(spec, weights)
        else:
            inputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
            if spec.keys_are_values:
                del inputs["v_proj"]
            self._input = weights.linear(
                *inputs,
                rows=tuple(inputs.values()),
                in_features=spec.hidden_size,
                bias=spec.qkv_bias,
            )
        self._output = weights.summed(
            "o_proj", rows=spec.hidden_size, terms=spec.outputs, bias=spec.output_bias
        )
        self._head_norm: RmsNorm | None = None
        self._whole_norms: WholeNorms | None = None
        if spec.qk_norm is not None and spec.norms_whole:
            self._whole_norms = WholeNorms(
                spec.qk_norm.build(weights, "q_norm", queries.total),
                spec.qk_norm.build(weights, "k_norm", keys.total),
                weights.ranks,
                queries=spec.outputs,
                keys=spec.keys,
            )
        elif spec.qk_norm is not None:
            self._head_norm = _head_norm(
                spec.qk_norm,
                weights,
                spec.head_dim,
                {"q": self._num_heads, "k": self._num_kv_heads},
            )
        self._sinks: Tensor | None = None
        if spec.sinks:
            sinks = weights.tensor("sinks", len(spec.heads), dtype=torch.float32, rows=spec.heads)
            self._sinks = sinks / spec.scale
        self._value_norm: RmsNorm | None = None
        if spec.value_norm is not None:
            ones = torch.ones(spec.head_dim, dtype=torch.float32, device=weights.device)
            self._value_norm = RmsNorm(weight=ones, spec=spec.value_norm)

    def forward(self, x: Tensor, stage_pass: StagePass) -> Tensor:
        """Implement `Mixer.forward`."""
        spec = self._spec
        heads, value, gate = torch.split(self._input(x), self._widths, dim=-1)
        if self._whole_norms is not None:
            heads = self._whole_norms.forward(heads)
        heads = heads.view(-1, self._num_heads + self._num_kv_heads, spec.head_dim)
        value = (
            value.view(-1, self._num_kv_heads, spec.head_dim)
            if self._widths[1]
            else heads[:, self._num_heads :]
        )
        if self._value_norm is not None:
            value = self._value_norm.forward(value)
        heads = self._normed_and_rotated(heads, stage_pass)
        query = heads[:, : self._num_heads]
        key = heads[:, self._num_heads :]
        out = (
            stage_pass.paged_attention()
            .run(self._layer_id, query, key, value, stage_pass.batch, sinks=self._sinks)
            .flatten(1)
        )
        return self._output(_gated(out, gate) if spec.output_gate else out)

    def _normed_and_rotated(self, heads: Tensor, stage_pass: StagePass) -> Tensor:
        """Normalize and rotate the heads of q and k, [T, heads, head_dim]."""
        norm = self._head_norm
        rotation = self._spec.rotation
        if rotation is Rotation.NONE:
            return heads if norm is None else norm.forward(heads)
        table = stage_pass.rotary_table(is_window=self._spec.window is not None)
        if rotation is Rotation.HALVES and norm is not None:
            return norm.forward_rotated(heads, table)
        if norm is not None:
            heads = norm.forward(heads)
        return (
            table.rotate_pairs(heads) if rotation is Rotation.PAIRS else table.rotate_halves(heads)
        )


def _gated(heads: Tensor, gate: Tensor) -> Tensor:
    """Return the heads times the sigmoid of the gate, both [T, N]."""
    if heads.device.type == "cpu" and has_kernels(heads.dtype) and heads.dtype == gate.dtype:
        return gate_heads(heads.contiguous(), dense_tokens(gate), Team())
    return heads * sigmoid(gate)


def _head_norm(
    spec: NormSpec, weights: Weights, head_dim: int, counts: Mapping[str, int]
) -> RmsNorm:
    """Return the norm for `counts` heads of q and of k, in this order."""
    if not spec.has_weights:
        ones = torch.ones(head_dim, dtype=torch.float32, device=weights.device)
        return RmsNorm(weight=ones, spec=spec)
    each = [
        weights.tensor(f"{name}_norm.weight", head_dim).expand(count, -1)
        for name, count in counts.items()
    ]
    return RmsNorm(weight=torch.cat(each), spec=spec)


def _gated_input(spec: AttentionSpec, weights: Weights) -> Linear:
    """Return the product for q, k, v and then the gates.

    Files interleave [query | gate] by head.
    """
    rows = spec.heads.times(2 * spec.head_dim)
    keys = spec.kv_heads.times(spec.head_dim)
    read = {
        f"{name}_proj.weight": each for name, each in zip("qkv", (rows, keys, keys), strict=True)
    }
    matrices = [
        weights.tensor(name, len(each), spec.hidden_size, rows=each) for name, each in read.items()
    ]
    scales = [weights.row_scales(name, each) for name, each in read.items()]
    updates = weights.updates(
        {"q_proj": rows, "k_proj": keys, "v_proj": keys},
        spec.hidden_size,
        arranged=partial(_gates_last, spec),
    )
    return weights.linear_from(
        _gates_last(spec, *matrices), _gates_last(spec, *scales), updates=updates
    )


def _gates_last(spec: AttentionSpec, both: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Reorder rows, of any shape, to q, k, v and the gates."""
    query, gate = both.view(len(spec.heads), 2, spec.head_dim, *both.shape[1:]).unbind(1)
    return torch.cat([query.flatten(0, 1), key, value, gate.flatten(0, 1)])
