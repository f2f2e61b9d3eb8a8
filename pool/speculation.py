"""The parts of a stage that speculate: trees on every stage, the draft on the last."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.backend import AttentionGeometry
from engine.attention.cpu import CpuAttention
from engine.attention.cpu_latent import CpuLatentAttention
from engine.attention.latent import LatentGeometry
from engine.attention.tree import TreeAttention
from engine.batch import ForwardBatch
from engine.memory.layout import CacheKind, CacheSpec
from engine.memory.pools import StagePools
from engine.numerics import Numerics
from engine.pipeline.executor import LayerObserver
from engine.recurrent.cpu import CpuRecurrent
from engine.recurrent.tree import TreeRecurrent
from engine.speculative.config import SpeculationConfig
from engine.speculative.draft_attention import DraftAttention
from engine.speculative.drafter import Drafter
from engine.speculative.eagle import EagleDrafter, PromptDrafter
from engine.speculative.handed import HandedEnds
from engine.speculative.multistep import MultiStepAttention
from engine.speculative.multistep_latent import MultiStepLatentAttention
from models.drafts.loader import DraftDescription, read_draft
from models.loader import ModelDescription
from pool.config import WorkerConfig


@dataclass(frozen=True)
class SpeculationPlan:
    """What follows from the draft's config and the flags; the same on every stage."""

    config: SpeculationConfig
    draft: DraftDescription
    handed: bool  # the draft's cache of the prompt and where it stands behind it are part of the handoff

    @property
    def first_layer(self) -> int:
        """The draft's layers follow the target's where the two are counted together."""
        return self.draft.target.facts.num_layers

    def handed_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        """The draft's caches and its end of the prompt as further layers of the last stage, if they travel."""
        if not self.handed:
            return ()
        cache = self.draft.cache_specs(page_size)
        topk = min(self.config.topk, self.draft.vocab_size)
        end = (CacheSpec(0, CacheKind.TOPK_P, (topk,), "float32", 4),
               CacheSpec(0, CacheKind.TOPK_INDEX, (topk,), "int64", 8),
               CacheSpec(0, CacheKind.DRAFT_HIDDEN, (self.draft.hidden_size,), cache[0].dtype, cache[0].item_bytes))
        return tuple(replace(spec, layer_id=self.first_layer + spec.layer_id, of_draft=True) for spec in (*cache, *end))

    @property
    def capture_layers(self) -> frozenset[int]:
        return self.draft.capture_layers

    def budget_specs(self, specs: tuple[CacheSpec, ...], page_size: int) -> tuple[CacheSpec, ...]:
        """What verification caches beside `specs`, as if layers of the target did: a state per node for every slot,
        and the draft's pages on the last stage unless they are counted as handed over."""
        last = max(spec.layer_id for spec in specs)
        states = (replace(spec, record_shape=(self.config.max_nodes, *spec.record_shape))
                  for spec in specs if not spec.kind.is_paged)
        own = () if self.handed else self.draft.cache_specs(page_size)
        return (*states, *(replace(spec, layer_id=last) for spec in own))


def plan_speculation(config: WorkerConfig, target: ModelDescription) -> SpeculationPlan | None:
    """None without a draft.

    Raises:
        ConfigError: the flags contradict each other, or the folder is not a draft of this target.
    """
    if config.draft is None:
        return None
    flags = SpeculationConfig(config.draft, config.spec_topk, config.spec_steps, config.spec_draft_tokens)
    return SpeculationPlan(flags, read_draft(config.draft, target), config.spec_prompt)


def tree_attention(paged: CpuAttention, kv_pools: Mapping[int, Tensor], geometry: AttentionGeometry,
                   numerics: Numerics) -> TreeAttention:
    def backend_over(pools: Mapping[int, Tensor]) -> CpuAttention:
        return CpuAttention(kv_pools=pools, geometry=geometry, numerics=numerics)

    return TreeAttention(paged=paged, kv_pools=kv_pools, page_size=geometry.page_size, backend_over=backend_over)


def tree_recurrent(slots: CpuRecurrent, conv_pools: Mapping[int, Tensor], state_pools: Mapping[int, Tensor],
                   numerics: Numerics, *, max_nodes: int) -> TreeRecurrent:
    def backend_over(convs: Mapping[int, Tensor], states: Mapping[int, Tensor]) -> CpuRecurrent:
        return CpuRecurrent(conv_pools=convs, state_pools=states, numerics=numerics)

    return TreeRecurrent(slots=slots, conv_pools=conv_pools, state_pools=state_pools, max_nodes=max_nodes,
                         backend_over=backend_over)


def build_drafter(plan: SpeculationPlan, pools: StagePools, *, numerics: Numerics) -> EagleDrafter:
    """Loads the draft. Its cache is that of the stage's extra layers, or its own of as many pages as the target's."""
    model, geometry = plan.draft.load(numerics=numerics), pools.geometry
    own: dict[CacheKind, dict[int, Tensor]] = {kind: {} for kind in CacheKind}
    for spec in model.cache_specs(geometry.page_size):
        own[spec.kind][spec.layer_id] = pools.of_kind(spec.kind)[plan.first_layer + spec.layer_id] if plan.handed else (
            torch.zeros(geometry.num_pages, *spec.record_shape, dtype=getattr(torch, spec.dtype)))
    attention = draft_attention(model.attention_geometry(geometry.page_size), own, numerics)
    ends = HandedEnds(*(pools.of_kind(kind)[plan.first_layer] for kind in
                        (CacheKind.TOPK_P, CacheKind.TOPK_INDEX, CacheKind.DRAFT_HIDDEN))) if plan.handed else None
    return EagleDrafter(model=model, attention=attention, topk=plan.config.topk, steps=plan.config.steps, handed=ends)


def draft_attention(geometry: AttentionGeometry | LatentGeometry, pools: Mapping[CacheKind, Mapping[int, Tensor]],
                    numerics: Numerics) -> DraftAttention:
    """Over a draft's pools, by kind and its own layer ids."""
    if isinstance(geometry, AttentionGeometry):
        kv = pools[CacheKind.KV]
        return DraftAttention.over_kv(CpuAttention(kv_pools=kv, geometry=geometry, numerics=numerics),
                                      MultiStepAttention(kv_pools=kv, geometry=geometry))
    latent, index = pools[CacheKind.LATENT], pools[CacheKind.INDEX_KEY]
    return DraftAttention.over_latents(
        CpuLatentAttention(latent_pools=latent, index_pools=index, geometry=geometry),
        MultiStepLatentAttention(latent_pools=latent, index_pools=index, geometry=geometry))


def prompt_drafter(plan: SpeculationPlan, drafter: EagleDrafter, observer: LayerObserver | None) -> Drafter:
    """For prefill pools: `observer` is told of the draft's layers as of any others."""
    layers = sorted({plan.first_layer + spec.layer_id for spec in plan.draft.cache_specs(1)})

    def on_followed(batch: ForwardBatch) -> None:
        if observer is not None:
            for layer_id in layers:
                observer(batch, layer_id)

    return PromptDrafter(drafter, on_followed)
