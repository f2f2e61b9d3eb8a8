"""EAGLE-1 and EAGLE-2 (Li et al. 2024): one layer over [embedding ; f], with the target's head.

The two differ in the growth of trees, not in the model. The layer has no input norm, and its result
is not normalized. f is the target's hidden state after its final norm, or the draft's own result of
the previous step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.contracts.model import ForwardContext
from engine.core.batch import ForwardBatch
from engine.memory.layout import CacheSpec
from models.blocks.attention import Attention, AttentionSpec, read_attention
from models.blocks.config import RawConfig, architecture_of, dtype_name
from models.blocks.linear import embed
from models.blocks.mlp import read_mlp
from models.blocks.rotary import Rotary, read_rope
from models.blocks.spec import StagePass, read_norm
from models.decoder import EMBEDDING
from models.drafts.weights import DraftFiles
from models.loader import ModelDescription


class Eagle1:
    """A `DraftModel`."""

    def __init__(self, *, files: DraftFiles) -> None:
        """Build the draft.

        Raises:
            ConfigError: the variant is not implemented, or the draft belongs to another target.
        """
        raw = files.raw
        weights = files.weights
        target = files.target
        (self._last_layer,) = capture_layers(raw, target)
        self._dtype = getattr(torch, dtype_name(raw))
        hidden = raw.integer("hidden_size")
        self._spec = _attention(raw)
        self._rotary = Rotary(
            spec=read_rope(raw, head_dim=self._spec.head_dim),
            dtype=self._dtype,
            device=weights.device,
        )
        self._embedding = weights.tensor(EMBEDDING, target.facts.vocab_size, hidden)
        self._target_norm = target.spec.norm.build(weights, "target_norm", hidden)
        self._fuse = weights.linear(
            "fc", rows=(hidden,), in_features=2 * hidden, bias=raw.flag("bias", default=True)
        )
        layer = weights.at("layers.0")
        self._attention = Attention(spec=self._spec, weights=layer.at("self_attn"), layer_id=0)
        self._post_norm = read_norm(raw).build(layer, "post_attention_layernorm", hidden)
        self._mlp = read_mlp(raw).build(layer.at("mlp"))
        self.vocab_size = target.facts.vocab_size
        self._head = weights.for_head().linear(
            "lm_head", rows=(self.vocab_size,), in_features=hidden
        )

    @property
    def capture_layers(self) -> frozenset[int]:
        return frozenset({self._last_layer})

    def attention_geometry(self, page_size: int) -> AttentionGeometry:
        return self._spec.attention_geometry(page_size)

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        return self._spec.cache_specs(layer_id=0, page_size=page_size, dtype=self._dtype)

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        """Implement `DraftModel.features`."""
        return self._target_norm.forward(aux_hidden[self._last_layer][tokens].to(self._dtype))

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Implement `DraftModel.forward`."""
        assert batch.token_ids is not None, "a draft reads tokens"
        hidden = self._fuse(torch.cat([embed(batch.token_ids, self._embedding), hidden], -1))
        stage_pass = StagePass(
            batch=batch, context=context, rotary=self._rotary.table(batch.positions)
        )
        hidden = hidden + self._attention.forward(hidden, stage_pass)
        return hidden + self._mlp.forward(self._post_norm.forward(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `DraftModel.logits`."""
        return self._head.logits(hidden)

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """Implement `DraftModel.target_ids`."""
        return token_ids


def build(*, files: DraftFiles) -> tuple[Eagle1]:
    """Build the draft.

    Raises:
        ConfigError: the variant is not implemented, or the draft belongs to another target.
    """
    return (Eagle1(files=files),)


def capture_layers(raw: RawConfig, target: ModelDescription) -> frozenset[int]:
    """Return the target's last layer.

    Raises:
        ConfigError: the variant is not implemented, or the draft belongs to another target.
    """
    raw.require("num_hidden_layers", only=1, default=1)
    for name in ("mlp_bias", "norm_before_residual", "norm_output"):
        raw.require(name, only=False, default=False)
    for name, width in (
        ("hidden_size", target.facts.hidden_size),
        ("vocab_size", target.facts.vocab_size),
    ):
        if raw.integer(name) != width:
            raise raw.fail(name, f"is {raw.integer(name)}, the target's is {width}")
    return frozenset({target.facts.num_layers - 1})


def cache_specs(raw: RawConfig, _target: ModelDescription, page_size: int) -> tuple[CacheSpec, ...]:
    return _attention(raw).cache_specs(
        layer_id=0, page_size=page_size, dtype=getattr(torch, dtype_name(raw))
    )


def _attention(raw: RawConfig) -> AttentionSpec:
    """Read the attention. Qwen2 always has biases on q, k and v; Llama if its config states so."""
    if architecture_of(raw).startswith("Qwen2"):
        return read_attention(raw, qkv_bias=True)
    bias = raw.flag("attention_bias", default=False)
    return read_attention(raw, qkv_bias=bias, output_bias=bias)
