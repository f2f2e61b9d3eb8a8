"""Multi-head latent attention (DeepSeek-V2) in absorbed form: heads work on the cached latent.

    ql = norm(W_qa x);   q_h = [q_n ; rope(q_r)] of W_qb ql, or of W_q x
    (c, k_r) = W_kva x;  cached per token: [norm(c) ; rope(k_r)]
    query_h = [W_k,h^T q_n ; q_r];   out_h = W_v,h (softmax-weighted sum of c)

W_k and W_v are the two parts of kv_b_proj. Some models rotate nothing. With DSA, a layer attends
only to selected keys. It computes the selection with its own indexer, or shares that of an earlier
layer.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.contracts.latent import LatentGeometry
from engine.core.layer_range import ONLY_RANK, Part, TensorRank
from engine.memory.layout import CacheKind, CacheSpec
from models.blocks.adapted import Rows, num_rows
from models.blocks.config import RawConfig
from models.blocks.indexer import Indexer, IndexerSpec
from models.blocks.linear import HeadwiseLinear, Linear
from models.blocks.norm import NormSpec, RmsNorm
from models.blocks.rotary import RopeSpec
from models.blocks.spec import Mixer, StagePass
from models.blocks.weights import Weights
from runtime.errors import InternalError

_LATENT_NORM = NormSpec(eps=1e-6)  # fixed in the published models, independent of rms_norm_eps


@dataclass(frozen=True)
class MlaSpec:
    """One latent attention layer.

    With `query_rank` 0, queries are one projection. Each token attends to `max_selected` keys, or
    to all if it is 0. With a selection, a layer with `indexer` computes it and a layer without one
    shares it. A layer that `takes_carried` computes it only if none is carried to it.
    """

    hidden_size: int
    num_heads: int
    query_rank: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    bias: bool
    is_rotated: bool = True
    max_selected: int = 0
    indexer: IndexerSpec | None = None
    takes_carried: bool = False
    rank: TensorRank = ONLY_RANK

    weights_name = "self_attn"
    chunk_grid = 1

    @property
    def shares_selection(self) -> bool:
        return self.max_selected > 0 and self.indexer is None

    def __post_init__(self) -> None:
        """Check that the ranks can divide it.

        Raises:
            ConfigError: they cannot.
        """
        _ = self.heads

    @property
    def heads(self) -> Part:
        """Return this rank's heads. Every rank has the whole cache and the whole selection."""
        return self.rank.part(self.num_heads, "heads of latent attention (num_attention_heads)")

    @property
    def outputs(self) -> tuple[Part, ...]:
        """Return the output values of each rank's heads."""
        return tuple(self.of_rank(rank).heads.times(self.value_dim) for rank in self.rank.every)

    def of_rank(self, rank: TensorRank) -> "MlaSpec":
        """Implement `MixerSpec.of_rank`."""
        return replace(self, rank=rank)

    def attention_geometry(self, page_size: int) -> LatentGeometry:
        return LatentGeometry(
            num_heads=len(self.heads),
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            page_size=page_size,
            scale=self.scale,
            max_selected=self.max_selected,
        )

    def cache_specs(
        self, *, layer_id: int, page_size: int, dtype: torch.dtype
    ) -> tuple[CacheSpec, ...]:
        dims = {CacheKind.LATENT: self.latent_dim + self.rope_dim}
        if self.indexer is not None:
            dims[CacheKind.INDEX_KEY] = self.indexer.head_dim
        return tuple(
            CacheSpec(
                layer_id=layer_id,
                kind=kind,
                record_shape=(page_size, dim),
                dtype=str(dtype).split(".")[1],
                item_bytes=dtype.itemsize,
            )
            for kind, dim in dims.items()
        )

    def build(self, weights: Weights, *, layer_id: int) -> Mixer:
        return Mla(spec=self, weights=weights, layer_id=layer_id)


def read_mla(
    raw: RawConfig,
    rope: RopeSpec | None,
    *,
    max_selected: int = 0,
    indexer: IndexerSpec | None = None,
) -> MlaSpec:
    """Read the fields of the DeepSeek, GLM-5 and Kimi families.

    Without `rope` nothing is rotated. `head_dim`, which some files contain, is ignored.

    Raises:
        ConfigError: `q_lora_rank` is missing although keys are selected, or there are biases
            without it.
    """
    query_rank = raw.integer("q_lora_rank") if indexer is not None or "q_lora_rank" in raw else 0
    if not query_rank:
        raw.require("attention_bias", only=False, default=False)
    nope_dim = raw.integer("qk_nope_head_dim")
    rope_dim = raw.integer("qk_rope_head_dim")
    return MlaSpec(
        hidden_size=raw.integer("hidden_size"),
        num_heads=raw.integer("num_attention_heads"),
        query_rank=query_rank,
        latent_dim=raw.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=raw.integer("v_head_dim"),
        bias=raw.flag("attention_bias", default=False),
        scale=(nope_dim + rope_dim) ** -0.5 * (1.0 if rope is None else rope.score_gain),
        is_rotated=rope is not None,
        max_selected=max_selected,
        indexer=indexer,
    )


def read_draft_mla(raw: RawConfig, selecting: MlaSpec) -> MlaSpec:
    """Return the mixer of a NextN layer, which selects keys itself.

    Steps of its rounds share a selection if the config states so.
    """
    return replace(
        selecting, takes_carried=raw.flag("index_share_for_mtp_iteration", default=False)
    )


class Mla:
    """A latent attention layer whose projections of x are one product."""

    def __init__(self, *, spec: MlaSpec, weights: Weights, layer_id: int) -> None:
        self._spec = spec
        self._layer_id = layer_id
        hidden = spec.hidden_size
        heads = spec.heads
        queries = heads.times(spec.nope_dim + spec.rope_dim)
        first: tuple[str, Rows] = (
            ("q_a_proj", spec.query_rank) if spec.query_rank else ("q_proj", queries)
        )
        self._input_widths = [num_rows(first[1]), spec.latent_dim, spec.rope_dim]
        self._input = weights.linear(
            first[0],
            "kv_a_proj_with_mqa",
            in_features=hidden,
            bias=spec.bias,
            rows=(first[1], spec.latent_dim + spec.rope_dim),
        )
        self._latent_norm = _LATENT_NORM.build(weights, "kv_a_layernorm", spec.latent_dim)
        self._query: tuple[RmsNorm, Linear] | None = None
        if spec.query_rank:
            self._query = (
                _LATENT_NORM.build(weights, "q_a_layernorm", spec.query_rank),
                weights.linear("q_b_proj", rows=(queries,), in_features=spec.query_rank),
            )
        rows = heads.times(spec.nope_dim + spec.value_dim)
        up = weights.tensor("kv_b_proj.weight", len(rows), spec.latent_dim, rows=rows)
        up = up.view(len(heads), spec.nope_dim + spec.value_dim, spec.latent_dim)
        self._to_latent = HeadwiseLinear(
            up[:, : spec.nope_dim].transpose(1, 2), allocate=weights.allocate
        )
        self._from_latent = HeadwiseLinear(up[:, spec.nope_dim :], allocate=weights.allocate)
        self._output = weights.summed("o_proj", rows=hidden, terms=spec.outputs, bias=spec.bias)
        self._indexer: Indexer | None = None
        if spec.indexer is not None:
            self._indexer = Indexer(
                spec=spec.indexer,
                hidden_size=hidden,
                query_rank=spec.query_rank,
                weights=weights.at("indexer"),
            )

    def forward(self, x: Tensor, stage_pass: StagePass) -> Tensor:
        """Implement `Mixer.forward`."""
        spec = self._spec
        query_latent, latent, key_rope = torch.split(self._input(x), self._input_widths, dim=-1)
        query = query_latent
        if self._query is not None:
            query_norm, project = self._query
            query_latent = query_norm.forward(query_latent)
            query = project(query_latent)
        query = query.view(-1, len(spec.heads), spec.nope_dim + spec.rope_dim)
        query_nope = query[..., : spec.nope_dim]
        query_rope = query[..., spec.nope_dim :]
        if spec.is_rotated:
            rotary = stage_pass.rotary_table()
            query_rope = rotary.rotate_pairs(query_rope)
            key_rope = rotary.rotate_pairs(key_rope[:, None])[:, 0]
        entries = torch.cat([self._latent_norm.forward(latent), key_rope], dim=-1)
        query = torch.cat([self._to_latent(query_nope), query_rope], dim=-1)
        selected = self._selection(x, query_latent, stage_pass)
        heads = stage_pass.latent_attention().run(
            self._layer_id, query, entries, selected, stage_pass.batch
        )
        return self._output(self._from_latent(heads).flatten(1))

    def _selection(self, x: Tensor, query_latent: Tensor, stage_pass: StagePass) -> Tensor | None:
        if self._spec.max_selected == 0:
            return None
        is_carried = self._spec.takes_carried and stage_pass.selected_keys is not None
        if self._indexer is not None and not is_carried:
            q, k, weights = self._indexer.forward(x, query_latent, stage_pass.rotary_table())
            stage_pass.selected_keys = stage_pass.latent_attention().select(
                self._layer_id, q, k, weights, stage_pass.batch
            )
        if stage_pass.selected_keys is None:
            raise InternalError(
                f"layer {self._layer_id} shares the keys of an earlier layer, which selected none"
            )
        return stage_pass.selected_keys
