"""EAGLE-3 (Li et al. 2025): one layer over three of the target's hidden states.

It has its own head and vocabulary. In the first step, g = fc [f_low ; f_mid ; f_high]; later g is
the draft's own hidden state, without fc. Attention reads [norm(embedding) ; norm(g)], and the
residual is g itself. The head reads the normalized result, the next step the plain one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.contracts.model import ForwardContext
from engine.core.batch import ForwardBatch
from engine.memory.layout import CacheSpec
from models.blocks.attention import AttentionSpec, read_attention
from models.blocks.config import RawConfig, dtype_name
from models.blocks.linear import embed
from models.blocks.mlp import read_mlp
from models.blocks.rotary import Rotary, read_rope
from models.blocks.spec import StagePass, read_norm
from models.blocks.weights import Weights
from models.decoder import EMBEDDING
from models.drafts.weights import DraftFiles
from models.loader import ModelDescription
from runtime.errors import ConfigError

_REFUSED = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "attention_bias",
    "mlp_bias",
)


class Eagle3:
    """A `DraftModel`."""

    def __init__(self, *, files: DraftFiles) -> None:
        """Build the draft.

        Raises:
            ConfigError: the variant is not implemented, or the draft belongs to another target.
        """
        raw = files.raw
        weights = files.weights
        target = files.target
        _check_variant(raw, target.facts.hidden_size, target.facts.vocab_size)
        self._layer_ids = aux_layer_ids(raw, target.facts.num_layers)
        self._dtype = getattr(torch, dtype_name(raw))
        hidden = raw.integer("hidden_size")
        norm = read_norm(raw)
        target_vocab = target.facts.vocab_size
        self._vocab_size = raw.integer("draft_vocab_size", target.facts.vocab_size)
        self._spec = read_attention(raw)
        self._rotary = Rotary(
            spec=read_rope(raw, head_dim=self._spec.head_dim),
            dtype=self._dtype,
            device=weights.device,
        )
        self._embedding = weights.tensor(EMBEDDING, target_vocab, hidden)
        self._fuse = weights.linear(
            "fc", rows=(hidden,), in_features=len(self._layer_ids) * target.facts.hidden_size
        )
        layer = weights.at("layers.0")
        self._input_norm = norm.build(layer, "input_layernorm", hidden)
        self._hidden_norm = norm.build(layer, "hidden_norm", hidden)
        self._post_norm = norm.build(layer, "post_attention_layernorm", hidden)
        self._attention = _Eagle3Attention(spec=self._spec, weights=layer.at("self_attn"))
        self._mlp = read_mlp(raw).build(layer.at("mlp"))
        self._norm = norm.build(weights, "norm", hidden)
        self._head = weights.for_head().linear(
            "lm_head", rows=(self._vocab_size,), in_features=hidden
        )
        self._offsets = None
        if self._vocab_size != target_vocab:
            self._offsets = weights.tensor("d2t", self._vocab_size, dtype=torch.int64)

    @property
    def capture_layers(self) -> frozenset[int]:
        return frozenset(self._layer_ids)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def attention_geometry(self, page_size: int) -> AttentionGeometry:
        return self._spec.attention_geometry(page_size)

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        return self._spec.cache_specs(layer_id=0, page_size=page_size, dtype=self._dtype)

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        """Implement `DraftModel.features`."""
        return self._fuse(
            torch.cat([aux_hidden[layer_id][tokens] for layer_id in self._layer_ids], -1).to(
                self._dtype
            )
        )

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Implement `DraftModel.forward`."""
        assert batch.token_ids is not None, "a draft reads tokens"
        embedded = self._input_norm.forward(embed(batch.token_ids, self._embedding))
        stage_pass = StagePass(
            batch=batch, context=context, rotary=self._rotary.table(batch.positions)
        )
        mixed = self._attention.forward(
            torch.cat([embedded, self._hidden_norm.forward(hidden)], -1), stage_pass
        )
        hidden = hidden + mixed
        return hidden + self._mlp.forward(self._post_norm.forward(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `DraftModel.logits`."""
        return self._head.logits(self._norm.forward(hidden))

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """Implement `DraftModel.target_ids`.

        A file's `d2t` holds the distance from the draft's id to the target's.
        """
        return token_ids if self._offsets is None else token_ids + self._offsets[token_ids]


class _Eagle3Attention:
    """Grouped-query attention whose input is twice as wide as its output."""

    def __init__(self, *, spec: AttentionSpec, weights: Weights) -> None:
        self._spec = spec
        self._widths = [
            heads * spec.head_dim
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        ]
        self._qkv = weights.linear(
            "q_proj", "k_proj", "v_proj", rows=self._widths, in_features=2 * spec.hidden_size
        )
        self._output = weights.linear(
            "o_proj", rows=(spec.hidden_size,), in_features=self._widths[0]
        )

    def forward(self, x: Tensor, stage_pass: StagePass) -> Tensor:
        heads = self._qkv(x).view(len(x), -1, self._spec.head_dim)
        turning = self._spec.num_heads + self._spec.num_kv_heads
        rotated = stage_pass.rotary_table().rotate_halves(heads[:, :turning])
        value = heads[:, turning:]
        query = rotated[:, : self._spec.num_heads]
        key = rotated[:, self._spec.num_heads :]
        heads = stage_pass.paged_attention().run(0, query, key, value, stage_pass.batch)
        return self._output(heads.reshape(len(x), -1))


def build(*, files: DraftFiles) -> tuple[Eagle3]:
    """Build the draft.

    Raises:
        ConfigError: the variant is not implemented, or the draft belongs to another target.
    """
    return (Eagle3(files=files),)


def capture_layers(raw: RawConfig, target: ModelDescription) -> frozenset[int]:
    """Return the target layers whose outputs the draft reads.

    Raises:
        ConfigError: the variant is not implemented, or the draft belongs to another target.
    """
    _check_variant(raw, target.facts.hidden_size, target.facts.vocab_size)
    return frozenset(aux_layer_ids(raw, target.facts.num_layers))


def cache_specs(raw: RawConfig, _target: ModelDescription, page_size: int) -> tuple[CacheSpec, ...]:
    return read_attention(raw).cache_specs(
        layer_id=0, page_size=page_size, dtype=getattr(torch, dtype_name(raw))
    )


def aux_layer_ids(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    """Return the target layers whose *output* a draft reads, in ascending order.

    They are in `eagle_config.eagle_aux_hidden_state_layer_ids`. Files of the speculators library
    have the field at the top level, and name the layer *after* the one whose output they mean.
    Without either, they are the layers whose outputs are the inputs of layers 2, n/2 and n-3.

    Raises:
        ConfigError: they are not three distinct layers of the target, or one is the embedding.
    """
    if "eagle_config" in raw and "eagle_aux_hidden_state_layer_ids" in raw.section("eagle_config"):
        found = raw.section("eagle_config").integers("eagle_aux_hidden_state_layer_ids")
    elif "eagle_aux_hidden_state_layer_ids" in raw:
        found = tuple(layer_id - 1 for layer_id in raw.integers("eagle_aux_hidden_state_layer_ids"))
    else:
        found = (1, num_layers // 2 - 1, num_layers - 4)
    if len(set(found)) != 3 or any(not 0 <= layer_id < num_layers for layer_id in found):
        raise ConfigError(
            f"the draft reads the outputs of layers {list(found)}; it needs three of the target's "
            f"{num_layers} layers",
            field="draft",
        )
    return found


def _check_variant(raw: RawConfig, target_hidden: int, target_vocab: int) -> None:
    sections = [raw, raw.section("eagle_config")] if "eagle_config" in raw else [raw]
    for section in sections:
        for name in _REFUSED:
            section.require(name, only=False, default=False)
        section.require("use_aux_hidden_state", only=True, default=True)
    raw.require("num_hidden_layers", only=1, default=1)
    for name, width in (("target_hidden_size", target_hidden), ("vocab_size", target_vocab)):
        if name in raw and raw.integer(name) != width:
            raise raw.fail(name, f"is {raw.integer(name)}, the target's is {width}")
    if raw.integer("hidden_size") != target_hidden:
        raise raw.fail(
            "hidden_size",
            f"{raw.integer('hidden_size')} without an embedding of its own must be the "
            f"target's {target_hidden}",
        )
