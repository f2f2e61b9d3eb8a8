"""The assistants of Gemma 4: drafts that read the target's cache and have none (frozen KV).

All steps of a chain are at the position of the newest token. x = pre_projection [embedding ; h],
with the target's scaled embedding. At first, h is the target's hidden state after the final norm;
later it is post_projection of the previous step's result. The layers have only queries. A layer
with a window reads the keys of the target's last layer with a window; a layer without reads those
of its last layer without. Each sees the keys that the newest cached token sees there. The head is
the draft's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.contracts.model import ForwardContext
from engine.core.batch import ForwardBatch
from engine.core.layer_range import TensorRank
from engine.memory.layout import CacheSpec
from models.blocks.attention import AttentionSpec
from models.blocks.config import RawConfig
from models.blocks.linear import embed
from models.blocks.rotary import Rotary
from models.blocks.spec import DecoderSpec, LayerSpec, Mixer, StagePass
from models.blocks.weights import Weights
from models.decoder import EMBEDDING, DecoderLayer
from models.drafts.mtp import check_target
from models.drafts.weights import DraftFiles
from models.gemma4 import read_decoder
from models.loader import ModelDescription

_OWN_EMBEDDING = "model.embed_tokens.weight"  # also the draft's head


@dataclass(frozen=True)
class ReadingSpec:
    """A `MixerSpec` of queries over the keys and values of layer `target_layer`."""

    attention: AttentionSpec
    target_layer: int

    shares_selection = False
    weights_name = "self_attn"
    chunk_grid = 1

    def attention_geometry(self, page_size: int) -> AttentionGeometry:
        return self.attention.attention_geometry(page_size)

    def cache_specs(
        self, *, layer_id: int, page_size: int, dtype: torch.dtype
    ) -> tuple[CacheSpec, ...]:
        """Return no specs: the layer caches nothing."""
        return ()

    def of_rank(self, rank: TensorRank) -> "ReadingSpec":
        """Implement `MixerSpec.of_rank`."""
        return replace(self, attention=self.attention.of_rank(rank))

    def build(self, weights: Weights, *, layer_id: int) -> Mixer:
        """Build the layer. Its own id does not determine its keys."""
        return ReadingAttention(spec=self, weights=weights)


class ReadingAttention:
    """A layer of queries only, normalized and rotated by head."""

    def __init__(self, *, spec: ReadingSpec, weights: Weights) -> None:
        own = spec.attention
        assert own.qk_norm is not None, "as read by the family"
        width = own.heads.times(own.head_dim)
        self._spec = own
        self._layer_id = spec.target_layer
        self._queries = weights.linear("q_proj", rows=(width,), in_features=own.hidden_size)
        self._norm = own.qk_norm.build(weights, "q_norm", own.head_dim)
        self._output = weights.summed("o_proj", rows=own.hidden_size, terms=own.outputs)

    def forward(self, x: Tensor, stage_pass: StagePass) -> Tensor:
        """Implement `Mixer.forward`."""
        query = self._norm.forward(self._queries(x).view(len(x), -1, self._spec.head_dim))
        query = stage_pass.rotary_table(is_window=self._spec.window is not None).rotate_halves(
            query
        )
        return self._output(
            stage_pass.cached_attention().read(self._layer_id, query, stage_pass.batch).flatten(1)
        )


class Gemma4Assistant:
    """A `FrozenModel`."""

    def __init__(self, files: DraftFiles) -> None:
        weights = files.weights
        target = files.target
        spec = _spec(files.raw, files.target)
        width = target.facts.hidden_size
        self._dtype = getattr(torch, target.facts.dtype)
        self._spec = spec
        self._last_layer = target.facts.num_layers - 1
        self._embedding_scale = torch.tensor(target.spec.embedding_scale, dtype=self._dtype).item()
        self._embedding = weights.tensor(EMBEDDING, target.facts.vocab_size, width)
        self._target_norm = target.spec.norm.build(weights, "target_norm", width)
        self._before = weights.linear(
            "pre_projection", rows=(spec.hidden_size,), in_features=2 * width
        )
        self._after = weights.linear("post_projection", rows=(width,), in_features=spec.hidden_size)
        rotary, window_rotary = (
            Rotary.of(rope, dtype=self._dtype, device=weights.device)
            for rope in (spec.rope, spec.window_rope)
        )
        self._layers = [
            DecoderLayer(
                spec=layer,
                decoder=spec,
                layer_id=layer_id,
                start_layer=0,
                rotary=rotary,
                window_rotary=window_rotary,
                weights=weights.at(f"layers.{layer_id}"),
            )
            for layer_id, layer in enumerate(spec.layers)
        ]
        self._norm = spec.norm.build(weights, "norm", spec.hidden_size)
        self._head = weights.linear("head", rows=(spec.vocab_size,), in_features=spec.hidden_size)

    @property
    def capture_layers(self) -> frozenset[int]:
        return frozenset({self._last_layer})

    def attention_geometry(self, page_size: int) -> AttentionGeometry:
        """Implement `FrozenModel.attention_geometry`."""
        return geometry_of(self._spec, page_size)

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        """Implement `FrozenModel.features`."""
        return self._target_norm.forward(aux_hidden[self._last_layer][tokens])

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Implement `FrozenModel.forward`."""
        assert batch.token_ids is not None, "a draft reads tokens"
        embedded = embed(batch.token_ids, self._embedding) * self._embedding_scale
        x = self._before(torch.cat([embedded, hidden], -1))
        stage_pass = StagePass(batch=batch, context=context)
        for layer in self._layers:
            x = layer.forward(x, stage_pass)
        return self._norm.forward(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `FrozenModel.logits`."""
        return self._head.logits(hidden)

    def onward(self, hidden: Tensor) -> Tensor:
        """Implement `FrozenModel.onward`."""
        return self._after(hidden)


def build(*, files: DraftFiles) -> Gemma4Assistant:
    return Gemma4Assistant(files)


def capture_layers(_raw: RawConfig, target: ModelDescription) -> frozenset[int]:
    return frozenset({target.facts.num_layers - 1})


def cache_specs(raw: RawConfig, target: ModelDescription, page_size: int) -> tuple[CacheSpec, ...]:
    """Return no specs.

    Raises:
        ConfigError: the draft belongs to another model.
    """
    _spec(raw, target)
    return ()


def read_layers(raw: RawConfig, target: ModelDescription) -> frozenset[int]:
    """Return the ids of the target's layers whose cache the draft reads."""
    return frozenset(
        layer.mixer.target_layer
        for layer in _spec(raw, target).layers
        if isinstance(layer.mixer, ReadingSpec)
    )


def own_name(_raw: RawConfig, key: str) -> str | None:
    """Return the draft's name of a tensor in its files.

    The embedding in the files is only the head. Tokens are looked up in the target's embedding.
    """
    return (
        "head.weight" if key in (_OWN_EMBEDDING, "lm_head.weight") else key.removeprefix("model.")
    )


def _spec(raw: RawConfig, target: ModelDescription) -> DecoderSpec:
    """Return the draft's layers over the target's.

    Raises:
        ConfigError: a field is not supported, or does not fit the target.
    """
    check_target(raw, target, width_field="backbone_hidden_size")
    raw.require("use_ordered_embeddings", only=False, default=False)
    # All layers share keys and values, with the target.
    spec = read_decoder(raw.updated({"num_kv_shared_layers": 0}))
    if (spec.rope, spec.window_rope) != (target.spec.rope, target.spec.window_rope):
        raise raw.fail("rope_parameters", "are not the target's, whose keys the draft reads")
    return replace(
        spec,
        layers=tuple(
            LayerSpec(_over_target(raw, layer.mixer, target), layer.feed_forward)
            for layer in spec.layers
        ),
    )


def _over_target(raw: RawConfig, mixer: object, target: ModelDescription) -> ReadingSpec:
    """Return the draft's layer over the target's last layer of the same kind."""
    assert isinstance(mixer, AttentionSpec), "as read by the family"
    for layer_id, layer in reversed(list(enumerate(target.spec.layers))):
        theirs = layer.mixer
        if isinstance(theirs, AttentionSpec) and theirs.window == mixer.window:
            found = theirs.num_kv_heads, theirs.head_dim
            if found != (mixer.num_kv_heads, mixer.head_dim):
                raise raw.fail(
                    "num_key_value_heads",
                    f"and head_dim are {mixer.num_kv_heads} and {mixer.head_dim}, "
                    f"the target caches {found[0]} and {found[1]}",
                )
            return ReadingSpec(mixer, layer_id)
    raise raw.fail(
        "sliding_window",
        f"and layer_types need layers that {target.facts.architecture} does not have",
    )


def geometry_of(spec: DecoderSpec, page_size: int) -> AttentionGeometry:
    """Return the geometry of layers without a window, with that of layers with one."""
    found = [layer.mixer.attention_geometry(page_size) for layer in spec.layers]
    geometries = [geometry for geometry in found if isinstance(geometry, AttentionGeometry)]
    windowed = next((geometry for geometry in geometries if geometry.window is not None), None)
    return replace(
        next((each for each in geometries if each.window is None), geometries[0]), windowed=windowed
    )
