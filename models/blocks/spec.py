"""The specs that a family returns: a decoder as a list of layers, each a mixer and a feed-forward.

A spec is plain data. Its cache needs follow from it without any weights, and it builds its block
from weights on request. So a family is a function from a config to a spec, and the code that all
families share is in `decoder.py` and `blocks/`.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.contracts.attention import AttentionBackend, AttentionGeometry, CachedAttention
from engine.contracts.latent import LatentAttentionBackend, LatentGeometry
from engine.contracts.model import ExpertTokens, ForwardContext
from engine.core.batch import ForwardBatch
from engine.core.layer_range import ONLY_RANK, Part, TensorRank
from engine.memory.layout import CacheSpec
from models.blocks.config import RawConfig
from models.blocks.norm import NormSpec
from models.blocks.rotary import RopeSpec, RotaryTable
from models.blocks.weights import Weights
from runtime.errors import InternalError

FULL_ATTENTION = "full_attention"  # in `layer_types`


@dataclass
class StagePass:
    """The values that the layers of a stage share during one forward.

    It is created for every forward, so that a layer cannot read values of an earlier batch.

        rotary         set by the stage's first layer, in models with positions
        window_rotary  the same for layers with a window, if their rope differs
        selected_keys  [T, n] int32 key positions, padded with -1; set by layers that select keys
                       and read by those that share the selection; for a draft, initially the keys
                       that the steps of its round carry
    """

    batch: ForwardBatch
    context: ForwardContext
    rotary: RotaryTable | None = None
    window_rotary: RotaryTable | None = None
    selected_keys: Tensor | None = None

    def rotary_table(self, *, is_window: bool = False) -> RotaryTable:
        """Return the table of this batch's positions.

        Raises:
            InternalError: the first layer has not set it.
        """
        table = self.window_rotary if is_window and self.window_rotary is not None else self.rotary
        if table is None:
            raise InternalError("the stage's first layer has not computed the rotary table")
        return table

    def paged_attention(self) -> AttentionBackend:
        """Return the stage's paged attention.

        Raises:
            InternalError: the stage was built without it.
        """
        if self.context.attention is None:
            raise InternalError("the stage was built without paged attention")
        return self.context.attention

    def cached_attention(self) -> CachedAttention:
        """Return the attention over the caches of other layers.

        Raises:
            InternalError: there is none.
        """
        if self.context.cached_attention is None:
            raise InternalError(
                "the layers were built without attention over caches of other layers"
            )
        return self.context.cached_attention

    def latent_attention(self) -> LatentAttentionBackend:
        """Return the stage's latent attention.

        Raises:
            InternalError: the stage was built without it.
        """
        if self.context.latent_attention is None:
            raise InternalError("the stage was built without latent attention")
        return self.context.latent_attention


class Mixer(Protocol):
    """The part of a layer in which tokens depend on others: attention or a recurrence."""

    def forward(self, x: Tensor, stage_pass: StagePass) -> Tensor:
        """Return [T, hidden] for x [T, hidden], which is normalized."""
        ...


class FeedForward(Protocol):
    """The part of a layer that computes each token independently."""

    @property
    def expert_tokens(self) -> ExpertTokens | None:
        """Return the tokens per expert, or None without experts."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden], which is normalized."""
        ...


class MixerSpec(Protocol):
    """The mixer of a layer."""

    @property
    def weights_name(self) -> str:
        """Return the part of the tensor names that follows the layer's prefix."""
        ...

    @property
    def chunk_grid(self) -> int:
        """Return the number of tokens of which prefill chunks must end on multiples."""
        ...

    @property
    def shares_selection(self) -> bool:
        """Return whether the layer attends to the keys that an earlier layer selected."""
        ...

    def attention_geometry(self, page_size: int) -> AttentionGeometry | LatentGeometry | None:
        """Return the geometry for the attention backend, or None for other mixers."""
        ...

    def cache_specs(
        self, *, layer_id: int, page_size: int, dtype: torch.dtype
    ) -> tuple[CacheSpec, ...]:
        """Return the data cached per page or per request. `dtype` is the model's."""
        ...

    def of_rank(self, rank: TensorRank) -> "MixerSpec":
        """Return one rank's part.

        Raises:
            ConfigError: the ranks cannot divide the mixer.
        """
        ...

    def build(self, weights: Weights, *, layer_id: int) -> Mixer:
        """Build the mixer. `weights` reads this rank's part of tensors under `weights_name`."""
        ...


class FeedForwardSpec(Protocol):
    """The feed-forward of a layer."""

    @property
    def num_experts(self) -> int:
        """Return the number of routed experts of all ranks; 0 without experts."""
        ...

    @property
    def counts_on_host(self) -> bool:
        """Return whether its launches depend on values that it reads back.

        A graph cannot capture it then.
        """
        ...

    def of_rank(self, rank: TensorRank) -> "FeedForwardSpec":
        """Return one rank's part, as `MixerSpec.of_rank` does."""
        ...

    def build(self, weights: Weights) -> FeedForward:
        """Build the feed-forward. `weights` reads this rank's part of its tensors."""
        ...


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a decoder."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec


@dataclass(frozen=True)
class DecoderSpec:
    """A whole model.

    rope               None if its attention has no positions
    window_rope        rope of layers with a window, if it differs
    num_extra_layers   layers after the last one that its files may have (NextN drafts)
    draft_layer        the form of such a layer, in families that may have them
    norms_outputs      whether mixers and feed-forwards have a norm after them, too
    scales_layers      whether each layer's output is multiplied by its own number
    embedding_scale    factor of embeddings, rounded to the model's dtype
    logit_bound        with a bound b, logits x become b tanh(x / b)
    other_names        parts of names in files with the blocks' spelling, in order of replacement
    inputs_first       suffixes, in either spelling, of stacks that files store as [items, in, out]
    context_field      the config field that sets `max_context_tokens`
    """

    vocab_size: int
    hidden_size: int
    max_context_tokens: int
    norm: NormSpec
    rope: RopeSpec | None
    layers: tuple[LayerSpec, ...]
    tied_head: bool
    num_extra_layers: int = field(default=0)
    draft_layer: LayerSpec | None = None
    window_rope: RopeSpec | None = None
    norms_outputs: bool = False
    scales_layers: bool = False
    embedding_scale: float = 1.0
    logit_bound: float | None = None
    other_names: tuple[tuple[str, str], ...] = ()
    inputs_first: tuple[str, ...] = ()
    context_field: str = "max_position_embeddings"
    rank: TensorRank = ONLY_RANK

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def __post_init__(self) -> None:
        """Check that the ranks can divide it.

        Raises:
            ConfigError: they cannot.
        """
        _ = self.vocabularies

    @property
    def vocabulary(self) -> Part:
        """Return the tokens whose embeddings and logits this rank has."""
        return self.vocabularies[self.rank.rank]

    @property
    def vocabularies(self) -> tuple[Part, ...]:
        """Return the vocabulary share of each rank."""
        return self.rank.parts(self.vocab_size, "tokens of the vocabulary (vocab_size)")

    def of_rank(self, rank: TensorRank) -> "DecoderSpec":
        """Return one rank's part of each stage.

        Mixers, which work per request, have the part of the rank's attention group.

        Raises:
            ConfigError: the ranks cannot divide the model.
        """
        layers = tuple(
            LayerSpec(layer.mixer.of_rank(rank.attention), layer.feed_forward.of_rank(rank))
            for layer in self.layers
        )
        return replace(self, layers=layers, rank=rank)


def read_norm(raw: RawConfig, *, zero_centred: bool = False) -> NormSpec:
    """Read `rms_norm_eps`, 1e-6 by default.

    Raises:
        ConfigError: the value is invalid.
    """
    return NormSpec(eps=raw.number("rms_norm_eps", 1e-6), zero_centred=zero_centred)


def read_layer_kinds(
    raw: RawConfig, *, usual: str, interval_field: str = "", interval: int = 0
) -> tuple[str, ...]:
    """Return the kind of each layer.

    It is `layer_types` if that is given or there is no interval. Otherwise the last layer of each
    interval has full attention, and the others are `usual`.

    Raises:
        ConfigError: another kind is named, or the number of kinds is not that of layers.
    """
    num_layers = raw.integer("num_hidden_layers")
    if interval and "layer_types" not in raw:
        interval = raw.integer(interval_field, interval)
        return tuple(
            usual if (layer_id + 1) % interval else FULL_ATTENTION for layer_id in range(num_layers)
        )
    kinds = raw.texts("layer_types")
    if len(kinds) != num_layers:
        raise raw.fail(
            "layer_types", f"names {len(kinds)} layers, num_hidden_layers is {num_layers}"
        )
    unknown = set(kinds) - {usual, FULL_ATTENTION}
    if unknown:
        raise raw.fail(
            "layer_types",
            f"{sorted(unknown)} are not supported, only {usual!r} and {FULL_ATTENTION!r}",
        )
    return kinds


def assemble_decoder(
    raw: RawConfig,
    *,
    layers: tuple[LayerSpec, ...],
    rope: RopeSpec | None,
    norm: NormSpec | None = None,
    draft_layer: LayerSpec | None = None,
) -> DecoderSpec:
    """Return a decoder of these layers, with the fields that every config names alike.

    Raises:
        ConfigError: a field is missing or out of range.
    """
    max_context_tokens, context_field = raw.context()
    return DecoderSpec(
        vocab_size=raw.integer("vocab_size"),
        hidden_size=raw.integer("hidden_size"),
        max_context_tokens=max_context_tokens,
        context_field=context_field,
        norm=norm or read_norm(raw),
        rope=rope,
        layers=layers,
        tied_head=raw.flag("tie_word_embeddings", default=False),
        draft_layer=draft_layer,
        num_extra_layers=0
        if draft_layer is None
        else raw.integer("num_nextn_predict_layers", 0, minimum=0),
    )
