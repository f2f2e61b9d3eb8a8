"""Qwen3.5's own draft: one full-attention layer of the family, whose tensors `mtp.*` lie in the target's checkpoint.

x = fc [norm(embedding) ; norm(h)]; the layer's result after `mtp.norm` goes to the head and into the next step.
h is the target's hidden state after its final norm. All norms are zero-centred, as in the whole family.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionGeometry
from engine.batch import ForwardBatch
from engine.memory.layout import CacheSpec
from models.blocks.rotary import Rotary
from models.config import RawConfig, dtype_name
from models.decoder import EMBEDDING, DecoderLayer
from models.drafts.weights import DraftFiles, draft_pass
from models.loader import ModelDescription
from models.spec import LayerSpec
from runtime.errors import ConfigError


class Qwen35Mtp:
    """A `DraftModel`."""

    def __init__(self, *, files: DraftFiles) -> None:
        """Raises ConfigError for targets without a full-attention layer."""
        raw, weights, target = files.raw, files.weights, files.target
        (self._last_layer,) = capture_layers(raw, target)
        self._spec = _layer_spec(target)
        self._dtype = getattr(torch, target.facts.dtype)
        hidden, norm = target.facts.hidden_size, target.spec.norm
        self._rotary = Rotary(spec=target.spec.rope, dtype=self._dtype)
        self._embedding = weights.tensor(EMBEDDING, target.facts.vocab_size, hidden)
        self._target_norm = norm.build(weights, "target_norm", hidden)
        self._embedding_norm = norm.build(weights, "pre_fc_norm_embedding", hidden)
        self._hidden_norm = norm.build(weights, "pre_fc_norm_hidden", hidden)
        self._fuse = weights.linear("fc", rows=(hidden,), in_features=2 * hidden)
        # The rotary table is made per batch, so the layer's own "first of the stage" duty is not called upon.
        self._layer = DecoderLayer(spec=self._spec, decoder=target.spec, layer_id=0, start_layer=0,
                                   rotary=self._rotary, weights=weights.at("layers.0"))
        self._norm = norm.build(weights, "norm", hidden)
        self.vocab_size = target.facts.vocab_size
        self._head = weights.linear("lm_head", rows=(self.vocab_size,), in_features=hidden)

    @property
    def capture_layers(self) -> frozenset[int]:
        return frozenset({self._last_layer})

    def attention_geometry(self, page_size: int) -> AttentionGeometry:
        geometry = self._spec.mixer.attention_geometry(page_size)
        assert isinstance(geometry, AttentionGeometry)
        return geometry

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        return self._spec.mixer.cache_specs(layer_id=0, page_size=page_size, dtype=self._dtype)

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        """See `DraftModel.features`."""
        return self._target_norm.forward(aux_hidden[self._last_layer][tokens])

    def forward(self, batch: ForwardBatch, hidden: Tensor, attention: AttentionBackend) -> Tensor:
        """See `DraftModel.forward`."""
        assert batch.token_ids is not None, "a draft reads tokens"
        embedded = self._embedding_norm.forward(F.embedding(batch.token_ids, self._embedding))
        x = self._fuse(torch.cat([embedded, self._hidden_norm.forward(hidden)], -1))
        return self._norm.forward(self._layer.forward(x, draft_pass(batch, attention, self._rotary)))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DraftModel.logits`."""
        return self._head(hidden).float()

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """See `DraftModel.target_ids`."""
        return token_ids


def capture_layers(raw: RawConfig, target: ModelDescription) -> frozenset[int]:
    """The target's last layer.

    Raises:
        ConfigError: another checkpoint than the target's own, or one with another number of draft layers.
    """
    raw.require("mtp_num_hidden_layers", only=1, default=1)
    for name, width in (("hidden_size", target.facts.hidden_size), ("vocab_size", target.facts.vocab_size)):
        if raw.integer(name) != width:
            raise raw.fail(name, f"is {raw.integer(name)}, the target's is {width}")
    if dtype_name(raw) != target.facts.dtype:
        raise raw.fail("dtype", f"is {dtype_name(raw)}, the target runs in {target.facts.dtype}")
    return frozenset({target.facts.num_layers - 1})


def cache_specs(raw: RawConfig, target: ModelDescription, page_size: int) -> tuple[CacheSpec, ...]:
    return _layer_spec(target).mixer.cache_specs(layer_id=0, page_size=page_size, dtype=getattr(torch, dtype_name(raw)))


def _layer_spec(target: ModelDescription) -> LayerSpec:
    for layer in target.spec.layers:
        if isinstance(layer.mixer.attention_geometry(1), AttentionGeometry):
            return layer
    raise ConfigError("the target has no full-attention layer that its MTP layer could be like", field="draft")
