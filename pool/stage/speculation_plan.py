"""The plan of speculation: what the flags and a draft model's config say, the same on every stage."""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.layer_range import LayerRange, TensorRank
from engine.memory.layout import CacheKind, CacheSpec
from engine.speculative.contracts.config import SUFFIX, Proposer, SpeculationConfig
from models.drafts.loader import DraftDescription, read_draft
from models.loader import ModelDescription
from pool.stage.config import WorkerConfig
from runtime.errors import ConfigError
from runtime.model_files.tokenizer_files import token_texts


@dataclass(frozen=True)
class SpeculationPlan:
    """The plan of speculation, the same on every stage.

    Stages verify the trees. This one has no draft model: the leader drafts, from text that it has.
    """

    config: SpeculationConfig

    @property
    def proposers(self) -> tuple[Proposer, ...]:
        """Return what drafts."""
        return ("suffix",)

    @property
    def handed(self) -> bool:
        """Return whether a draft model's state of the prompt is part of the handoff."""
        return False

    @property
    def revision(self) -> str:
        """Return the digest of the draft model's config; empty without one."""
        return ""

    @property
    def weight_bytes(self) -> int:
        """Return the size of the draft model."""
        return 0

    @property
    def notices(self) -> tuple[str, ...]:
        """Return the texts that an operator should know about the draft model."""
        return ()

    @property
    def capture_layers(self) -> frozenset[int]:
        """Return the global ids of the target's layers whose outputs the draft model reads."""
        return frozenset()

    def handed_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        """Return the specs of the draft model's caches and end state that are handed over.

        They count as further layers of the last stage.
        """
        return ()

    def own_specs(self, specs: tuple[CacheSpec, ...], page_size: int) -> tuple[CacheSpec, ...]:
        """Return the specs of the draft model's pages, as caches of the target's last layer.

        Return none if they are part of the handoff, where they are counted already.
        """
        return ()

    def scratch_specs(self, specs: tuple[CacheSpec, ...]) -> tuple[CacheSpec, ...]:
        """Return the specs of a request's verification on a rank: a recurrent state per node."""
        return tuple(
            replace(spec, record_shape=(self.config.max_nodes, *spec.record_shape), split_axis=None)
            for spec in specs
            if not spec.kind.is_paged and spec.kind is not CacheKind.WINDOW
        )


@dataclass(frozen=True)
class DraftModelPlan(SpeculationPlan):
    """The plan of speculation with a draft model.

    It follows from the draft model's config and the flags.
    """

    draft: DraftDescription
    sends_state: bool  # if both pools have the draft model
    has_suffixes: bool = True

    @property
    def proposers(self) -> tuple[Proposer, ...]:
        return ("model", "suffix") if self.has_suffixes else ("model",)

    @property
    def handed(self) -> bool:
        return self.sends_state

    @property
    def revision(self) -> str:
        return self.draft.revision

    @property
    def weight_bytes(self) -> int:
        return self.draft.weight_bytes

    @property
    def notices(self) -> tuple[str, ...]:
        return self.draft.notices

    @property
    def first_layer(self) -> int:
        """Return the number of the draft model's first layer: it follows the target's layers."""
        return self.draft.target.facts.num_layers

    def handed_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        if not self.handed:
            return ()
        cache = self.draft.cache_specs(page_size)
        is_layerwise = self.draft.num_chain_layers > 1
        first = (
            self.draft.num_chain_layers
            if is_layerwise
            else min(self.config.topk, self.draft.vocab_size)
        )
        end = [
            CacheSpec(0, CacheKind.TOPK_P, (first,), "float32", 4),
            CacheSpec(0, CacheKind.TOPK_INDEX, (first,), "int64", 8),
        ]
        if not is_layerwise:  # a layerwise draft hands over whole chains instead
            end.append(
                CacheSpec(
                    0,
                    CacheKind.DRAFT_HIDDEN,
                    (self.draft.hidden_size,),
                    cache[0].dtype,
                    cache[0].item_bytes,
                )
            )
        if self.draft.num_shared_keys and self.config.topk == 1:
            end.append(
                CacheSpec(0, CacheKind.DRAFT_KEYS, (self.draft.num_shared_keys,), "int32", 4)
            )
        return tuple(
            replace(spec, layer_id=self.first_layer + spec.layer_id, of_draft=True, split_axis=None)
            for spec in (*cache, *end)
        )

    @property
    def capture_layers(self) -> frozenset[int]:
        return self.draft.capture_layers

    def own_specs(self, specs: tuple[CacheSpec, ...], page_size: int) -> tuple[CacheSpec, ...]:
        last = max(spec.layer_id for spec in specs)
        return (
            ()
            if self.handed
            else tuple(
                replace(spec, layer_id=last, split_axis=None)
                for spec in self.draft.cache_specs(page_size)
            )
        )


def plan_speculation(config: WorkerConfig, target: ModelDescription) -> SpeculationPlan | None:
    """Return the plan of speculation, or None without drafts.

    Raises:
        ConfigError: the flags contradict each other, the folder is not a draft of this target, or
            the target does not support speculation.
    """
    if config.draft is None:
        return None
    flags = _flags(config, config.draft)
    if any(spec.kind is CacheKind.WINDOW for spec in target.cache_specs(config.page_size)):
        _check_window(flags, config.page_size)
    if config.draft == SUFFIX:
        return SpeculationPlan(flags)
    draft = read_draft(config.draft, target)
    if draft.is_ordinary:
        _check_vocabulary(config.model, config.draft)
    if draft.num_chain_layers > 1:
        flags = _layerwise(flags, draft.num_chain_layers)
    sends_state = config.spec_prompt and not draft.is_frozen
    return DraftModelPlan(flags, draft, sends_state, config.spec_suffix)


def _flags(config: WorkerConfig, draft: Path) -> SpeculationConfig:
    """Return the settings of the flags.

    Raises:
        ConfigError: they contradict each other, or `SUFFIX` is to draft trees.
    """
    steps = config.spec_steps
    if draft == SUFFIX:
        if config.spec_topk > 1:
            raise ConfigError(
                f"spec_topk {config.spec_topk} makes trees; --draft {SUFFIX} drafts chains only: "
                f"spec_topk must be 1",
                field="spec_topk",
            )
        steps = config.spec_draft_tokens
    return SpeculationConfig(draft, config.spec_topk, steps, config.spec_draft_tokens)


def _check_vocabulary(model: Path, draft: Path) -> None:
    """Check that tokens of the model mean the same to the draft.

    Raises:
        ConfigError: they do not.
    """
    own, drafts = token_texts(model), token_texts(draft)
    other = next(
        (token for token in sorted(own) if own[token] != drafts.get(token, own[token])), None
    )
    if other is not None:
        raise ConfigError(
            f"the draft has another tokenizer: token {other} is {drafts[other]!r}, the model's is "
            f"{own[other]!r}",
            field="draft",
        )


def _check_window(flags: SpeculationConfig, page_size: int) -> None:
    """Check that layers with sliding windows can verify the drafts.

    Raises:
        ConfigError: the drafts are trees, or have more tokens than a page.
    """
    if flags.topk > 1:
        raise ConfigError(
            f"spec_topk {flags.topk} makes trees; models with sliding windows verify chains only: "
            f"spec_topk must be 1",
            field="spec_topk",
        )
    if flags.max_nodes > page_size:
        raise ConfigError(
            f"spec_draft_tokens must be less than the page_size {page_size} for models with sliding "
            f"windows, is {flags.num_draft_tokens}",
            field="spec_draft_tokens",
        )


def _layerwise(flags: SpeculationConfig, num_layers: int) -> SpeculationConfig:
    """Return the config for a draft with one layer per step, which makes chains.

    A chain has at most one token per layer.

    Raises:
        ConfigError: trees were requested.
    """
    if flags.topk > 1:
        raise ConfigError(
            f"spec_topk {flags.topk} makes trees; this draft has {num_layers} layers, one for each step, "
            f"which make chains: spec_topk must be 1",
            field="spec_topk",
        )
    steps = min(flags.steps, num_layers)
    return replace(flags, steps=steps, num_draft_tokens=steps)


def check_frozen(plan: DraftModelPlan, last: LayerRange, rank: TensorRank) -> None:
    """Check that the last stage has the whole target cache that a frozen draft reads.

    Raises:
        ConfigError: it does not.
    """
    elsewhere = sorted(layer_id for layer_id in plan.draft.read_layers if layer_id not in last)
    if elsewhere:
        read = " and ".join(map(str, sorted(plan.draft.read_layers)))
        raise ConfigError(
            f"the draft reads the caches of layers {read}; the last stage has layers {last} and needs "
            f"{elsewhere[0]} as well",
            field="partition",
        )
    if plan.draft.is_frozen and rank.attention.size > 1:
        raise ConfigError(
            f"--tp {rank.size}: the draft reads the target's cache, of which a rank has only a part",
            field="tp",
        )
