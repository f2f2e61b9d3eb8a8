"""What a family declares: a decoder as a list of layers, each a token mixer and a feed-forward.

A spec is plain data. Its cache needs follow from it without any weights, and it builds its block
from them. So a family file only reads config fields into specs, and everything that is the same for
all families lives in `decoder.py` and `blocks/`.
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
    """One forward of one stage: what its layers share. Made new for every forward, so that nothing
    of an earlier batch can be read by mistake.

    rotary         set by the stage's first layer, of models that know positions
    window_rotary  likewise, of layers that see a window only, where theirs differs
    selected_keys  [T, n] int32 key positions, -1 where there are fewer; set by layers that select keys, read by those
                   that share the selection; a draft's begins with what the steps of its round carry
    """

    batch: ForwardBatch
    context: ForwardContext
    rotary: RotaryTable | None = None
    window_rotary: RotaryTable | None = None
    selected_keys: Tensor | None = None

    def rotary_table(self, *, is_window: bool = False) -> RotaryTable:
        """Of this batch's positions. Raises InternalError where the first layer has not set it."""
        table = self.window_rotary if is_window and self.window_rotary is not None else self.rotary
        if table is None:
            raise InternalError("the stage's first layer has not computed the rotary table")
        return table

    def paged_attention(self) -> AttentionBackend:
        """Raises InternalError on a stage that was built without."""
        if self.context.attention is None:
            raise InternalError("the stage was built without paged attention")
        return self.context.attention

    def cached_attention(self) -> CachedAttention:
        """Over what other layers keep. Raises InternalError where there is none."""
        if self.context.cached_attention is None:
            raise InternalError("the layers were built without a cache of others to read")
        return self.context.cached_attention

    def latent_attention(self) -> LatentAttentionBackend:
        """Raises InternalError on a stage that was built without."""
        if self.context.latent_attention is None:
            raise InternalError("the stage was built without latent attention")
        return self.context.latent_attention


class Mixer(Protocol):
    """The part of a layer in which tokens depend on others: attention, or a recurrence."""

    def forward(self, x: Tensor, stage_pass: StagePass) -> Tensor:
        """x: [T, hidden], normalised. Returns [T, hidden]."""
        ...


class FeedForward(Protocol):
    """The part of a layer that computes each token by itself."""

    @property
    def expert_tokens(self) -> ExpertTokens | None:
        """Of a feed-forward with experts."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden], normalised. Returns [T, hidden]."""
        ...


class MixerSpec(Protocol):
    """How a layer mixes tokens."""

    @property
    def weights_name(self) -> str:
        """The key part of its tensors, below the layer's."""
        ...

    @property
    def chunk_grid(self) -> int:
        """Prefill chunks must end on multiples of this many tokens."""
        ...

    @property
    def shares_selection(self) -> bool:
        """Whether it attends to the keys that an earlier layer selected."""
        ...

    def attention_geometry(self, page_size: int) -> AttentionGeometry | LatentGeometry | None:
        """Of the attention backend it runs on; None if it is no attention."""
        ...

    def cache_specs(
        self, *, layer_id: int, page_size: int, dtype: torch.dtype
    ) -> tuple[CacheSpec, ...]:
        """What it keeps of each page or of each request, of this rank's part; `dtype` is the
        model's."""
        ...

    def of_rank(self, rank: TensorRank) -> "MixerSpec":
        """What one rank of a stage has of it. Raises ConfigError where it cannot be divided so."""
        ...

    def build(self, weights: Weights, *, layer_id: int) -> Mixer:
        """`weights` reads this rank's part of those below `weights_name`."""
        ...


class FeedForwardSpec(Protocol):
    """How a layer computes each token by itself."""

    @property
    def num_experts(self) -> int:
        """Routed ones, those of other ranks included; 0 without."""
        ...

    @property
    def counts_on_host(self) -> bool:
        """Whether what it starts depends on values that it reads back, so that no graph can hold
        it."""
        ...

    def of_rank(self, rank: TensorRank) -> "FeedForwardSpec":
        """See `MixerSpec.of_rank`."""
        ...

    def build(self, weights: Weights) -> FeedForward:
        """`weights` reads this rank's part of those below the feed-forward's name."""
        ...


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a decoder."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec


@dataclass(frozen=True)
class DecoderSpec:
    """A whole model. Without `rope` its attention knows no positions. `num_extra_layers` layers
    after the last (NextN drafts) may be in its files and are not its; `draft_layer` is what such a
    layer is like, in families that may have them. `window_rope`: of layers that see a window only,
    where it differs. With `norms_outputs` mixers and feed-forwards have a norm behind them, too.
    With `scales_layers` what a layer gives is multiplied by a number of its own. Embeddings are
    multiplied by `embedding_scale`, rounded to the model's type. With `logit_bound` b logits x
    become b tanh(x / b). `other_names`: parts of names that files spell in another way than blocks
    do, with the blocks' spelling, in the order in which they are replaced. `inputs_first`: ends of
    names, in either spelling, of stacks of matrices that files hold as [items, in, out].
    `context_field`: what of the config sets `max_context_tokens`."""

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
        """Raises ConfigError where the ranks cannot divide it."""
        _ = self.vocabularies

    @property
    def vocabulary(self) -> Part:
        """The tokens whose embeddings and logits this rank has."""
        return self.vocabularies[self.rank.rank]

    @property
    def vocabularies(self) -> tuple[Part, ...]:
        """Those of each rank."""
        return self.rank.shares(self.vocab_size, "tokens of the vocabulary (vocab_size)")

    def of_rank(self, rank: TensorRank) -> "DecoderSpec":
        """What one rank of each stage has of it; of what is done by request, the part of its
        attention rank. Raises ConfigError where it cannot be divided so."""
        layers = tuple(
            LayerSpec(layer.mixer.of_rank(rank.attention), layer.feed_forward.of_rank(rank))
            for layer in self.layers
        )
        return replace(self, layers=layers, rank=rank)


def read_norm(raw: RawConfig, *, zero_centred: bool = False) -> NormSpec:
    """With `rms_norm_eps` of the config, 1e-6 where it is absent. Raises ConfigError."""
    return NormSpec(eps=raw.number("rms_norm_eps", 1e-6), zero_centred=zero_centred)


def read_layer_kinds(
    raw: RawConfig, *, usual: str, interval_field: str = "", interval: int = 0
) -> tuple[str, ...]:
    """`layer_types` if given or there is no interval, else full attention on the last layer of each
    interval, `usual` on the others.

    Raises:
        ConfigError: another kind is named, or as many as there are not layers.
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
    """A decoder of these layers with the fields every config spells alike.

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
