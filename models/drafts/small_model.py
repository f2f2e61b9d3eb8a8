"""A small ordinary model as a draft, such as one of 0.6B for one of 8B of the same family.

It reads tokens only, nothing of the target. Its cache has slots like those of other drafts: slot t
has token t + 1 at position t. So it never sees the first token, and all positions are one less than
the model's own, which rotary embeddings do not notice.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.contracts.model import ForwardContext
from engine.core.batch import ForwardBatch
from engine.memory.layout import CacheKind, CacheSpec
from models.blocks.attention import AttentionSpec
from models.blocks.config import RawConfig, architecture_of, dtype_name
from models.blocks.linear import embed
from models.blocks.rotary import Rotary
from models.blocks.spec import DecoderSpec, StagePass
from models.blocks.weights import Weights
from models.decoder import EMBEDDING, HEAD, DecoderLayer
from models.drafts.weights import DraftFiles
from models.loader import ModelDescription
from models.registry import read_decoder
from runtime.errors import ConfigError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


class SmallModel:
    """A `DraftModel`. Its states between steps are those after its final norm."""

    def __init__(self, *, files: DraftFiles) -> None:
        """Build the draft.

        Raises:
            ConfigError: the model is not of the supported kind.
        """
        raw = files.raw
        weights = files.weights
        spec = read_spec(raw)
        self._dtype = getattr(torch, dtype_name(raw))
        self._width = spec.hidden_size
        self._specs = attention_specs(spec)
        self._last_layer = files.target.facts.num_layers - 1
        rotary = Rotary.of(spec.rope, dtype=self._dtype, device=weights.device)
        self._layers = [
            DecoderLayer(
                spec=layer,
                decoder=spec,
                layer_id=layer_id,
                start_layer=0,
                rotary=rotary,
                weights=weights.at(f"layers.{layer_id}"),
            )
            for layer_id, layer in enumerate(spec.layers)
        ]
        self._norm = spec.norm.build(weights, "norm", spec.hidden_size)
        name = (EMBEDDING if spec.tied_head else HEAD).removesuffix(".weight")
        self._head = weights.for_head().linear(
            name, rows=(spec.vocab_size,), in_features=spec.hidden_size
        )
        is_shared = spec.tied_head and not weights.weight_format.is_coded
        if is_shared and spec.vocab_size >= files.target.facts.vocab_size:
            self._embed = self._head.weight_rows
        else:
            self._embed = partial(embed, table=_table(spec, weights, files.target))
        self.vocab_size = min(spec.vocab_size, files.target.facts.vocab_size)

    @property
    def capture_layers(self) -> frozenset[int]:
        return frozenset({self._last_layer})

    def attention_geometry(self, page_size: int) -> AttentionGeometry:
        return self._specs[0].attention_geometry(page_size)

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        return _cache_specs(self._specs, page_size, self._dtype)

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        """Implement `DraftModel.features`: there are none."""
        return torch.zeros(
            len(tokens), self._width, dtype=self._dtype, device=aux_hidden[self._last_layer].device
        )

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Implement `DraftModel.forward`."""
        assert batch.token_ids is not None, "a draft reads tokens"
        hidden = self._embed(batch.token_ids)
        stage_pass = StagePass(batch=batch, context=context)
        for layer in self._layers:
            hidden = layer.forward(hidden, stage_pass)
        return self._norm.forward(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `DraftModel.logits`."""
        return self._head.logits(hidden)[:, : self.vocab_size]

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """Implement `DraftModel.target_ids`."""
        return token_ids


def build(*, files: DraftFiles) -> tuple[SmallModel]:
    """Build the draft. Raises ConfigError: the model is not of the supported kind."""
    return (SmallModel(files=files),)


def capture_layers(raw: RawConfig, target: ModelDescription) -> frozenset[int]:
    """Return the target's last layer, which a draft has to name; nothing of it is used.

    Raises:
        ConfigError: the model is not of the supported kind.
    """
    read_spec(raw)
    return frozenset({target.facts.num_layers - 1})


def cache_specs(raw: RawConfig, _target: ModelDescription, page_size: int) -> tuple[CacheSpec, ...]:
    return _cache_specs(attention_specs(read_spec(raw)), page_size, getattr(torch, dtype_name(raw)))


def own_name(raw: RawConfig, key: str) -> str | None:
    """Return the model's name of a tensor in its files."""
    name = key.removeprefix("model.")
    return None if name == HEAD and read_spec(raw).tied_head else name


def read_spec(raw: RawConfig) -> DecoderSpec:
    """Return the model.

    Raises:
        ConfigError: a layer is no attention over the whole text.
    """
    spec = read_decoder(architecture_of(raw), raw)
    attention_specs(spec)
    return spec


def attention_specs(spec: DecoderSpec) -> list[AttentionSpec]:
    """Return the attention of each layer.

    Raises:
        ConfigError: a layer is no attention over the whole text.
    """
    found = []
    for layer_id, layer in enumerate(spec.layers):
        mixer = layer.mixer
        kinds = {
            each.kind
            for each in mixer.cache_specs(layer_id=layer_id, page_size=1, dtype=torch.float32)
        }
        if not isinstance(mixer, AttentionSpec) or kinds != {CacheKind.KV}:
            raise ConfigError(
                f"layer {layer_id} of the draft is not attention over the whole text; models with windows "
                f"or recurrent layers are not supported as drafts",
                field="draft",
            )
        found.append(mixer)
    return found


def _cache_specs(
    specs: list[AttentionSpec], page_size: int, dtype: torch.dtype
) -> tuple[CacheSpec, ...]:
    return tuple(
        each
        for layer_id, spec in enumerate(specs)
        for each in spec.cache_specs(layer_id=layer_id, page_size=page_size, dtype=dtype)
    )


def _table(spec: DecoderSpec, weights: Weights, target: ModelDescription) -> Tensor:
    """Return the embeddings, with rows of zeros for ids that only the target has."""
    own = weights.tensor(EMBEDDING, spec.vocab_size, spec.hidden_size)
    missing = target.facts.vocab_size - spec.vocab_size
    return own if missing <= 0 else torch.cat([own, own.new_zeros(missing, spec.hidden_size)])
