"""Drafts that belong to a target (multi-token prediction): one more layer of its own kind.

x = fuse [norm(embedding) ; norm(h)]. The layer's result passes a separate norm, and is the input of
the target's head and of the next step. h is the target's hidden state after its final norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.contracts.latent import LatentGeometry
from engine.contracts.model import ForwardContext
from engine.core.batch import ForwardBatch
from engine.core.draft_trees import CarriedKeys
from engine.memory.layout import CacheSpec
from models.blocks.config import RawConfig, dtype_name
from models.blocks.linear import embed
from models.blocks.rotary import Rotary
from models.blocks.spec import LayerSpec, StagePass
from models.decoder import EMBEDDING, DecoderLayer
from models.drafts.weights import DraftFiles
from models.loader import ModelDescription


@dataclass(frozen=True)
class MtpNames:
    """A family's names of the parts around the layer."""

    embedding_norm: str
    hidden_norm: str
    fuse: str
    norm: str


class MtpShared:
    """The parts that a draft's layers share: embedding, final norm and head of the target, rope."""

    def __init__(self, files: DraftFiles) -> None:
        weights = files.weights
        target = files.target
        self.vocab_size = target.facts.vocab_size
        hidden = target.facts.hidden_size
        self.rotary = Rotary.of(
            target.spec.rope, dtype=getattr(torch, target.facts.dtype), device=weights.device
        )
        self.embedding = weights.tensor(EMBEDDING, self.vocab_size, hidden)
        self.target_norm = target.spec.norm.build(weights, "target_norm", hidden)
        self.head = weights.for_head().linear(
            "lm_head", rows=(self.vocab_size,), in_features=hidden
        )


class Mtp:
    """A `DraftModel` of one layer, or with `layer_id` one of several that each run one step."""

    def __init__(
        self,
        *,
        files: DraftFiles,
        shared: MtpShared,
        layer: LayerSpec,
        names: MtpNames,
        layer_id: int = 0,
    ) -> None:
        weights = files.weights
        target = files.target
        self._last_layer = target.facts.num_layers - 1
        self._mixer = layer.mixer
        self._layer_id = layer_id
        self._dtype = getattr(torch, target.facts.dtype)
        hidden = target.facts.hidden_size
        norm = target.spec.norm
        self._shared = shared
        self._embedding_norm = norm.build(weights, names.embedding_norm, hidden)
        self._hidden_norm = norm.build(weights, names.hidden_norm, hidden)
        self._fuse = weights.linear(names.fuse, rows=(hidden,), in_features=2 * hidden)
        self._layer = DecoderLayer(
            spec=layer,
            decoder=target.spec,
            layer_id=layer_id,
            start_layer=layer_id,
            rotary=shared.rotary,
            weights=weights.at(f"layers.{layer_id}"),
        )
        self._norm = norm.build(weights, names.norm, hidden)
        self.vocab_size = shared.vocab_size

    @property
    def capture_layers(self) -> frozenset[int]:
        return frozenset({self._last_layer})

    def attention_geometry(self, page_size: int) -> AttentionGeometry | LatentGeometry:
        geometry = self._mixer.attention_geometry(page_size)
        assert geometry is not None, "the layer of a draft is attention"
        return geometry

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        return self._mixer.cache_specs(
            layer_id=self._layer_id, page_size=page_size, dtype=self._dtype
        )

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        """Implement `DraftModel.features`."""
        return self._shared.target_norm.forward(aux_hidden[self._last_layer][tokens])

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Implement `DraftModel.forward`."""
        assert batch.token_ids is not None, "a draft reads tokens"
        embedded = self._embedding_norm.forward(embed(batch.token_ids, self._shared.embedding))
        x = self._fuse(torch.cat([embedded, self._hidden_norm.forward(hidden)], -1))
        carried = batch.spec_info if isinstance(batch.spec_info, CarriedKeys) else CarriedKeys()
        stage_pass = StagePass(batch=batch, context=context, selected_keys=carried.selected)
        hidden = self._norm.forward(self._layer.forward(x, stage_pass))
        carried.selected = stage_pass.selected_keys
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `DraftModel.logits`."""
        return self._shared.head.logits(hidden)

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """Implement `DraftModel.target_ids`."""
        return token_ids


def check_target(
    raw: RawConfig, target: ModelDescription, *, width_field: str = "hidden_size"
) -> None:
    """Check that the draft fits the target.

    Raises:
        ConfigError: the target has another width, vocabulary or dtype.
    """
    for name, width in (
        (width_field, target.facts.hidden_size),
        ("vocab_size", target.facts.vocab_size),
    ):
        if raw.integer(name) != width:
            raise raw.fail(name, f"is {raw.integer(name)}, the target's is {width}")
    if dtype_name(raw) != target.facts.dtype:
        raise raw.fail("dtype", f"is {dtype_name(raw)}, the target runs in {target.facts.dtype}")
