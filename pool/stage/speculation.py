"""The speculative parts of a stage: trees on every stage, and the draft model on the last stage,
whole on the rank that samples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.assembly.backend_set import Backends
from engine.backends.cpu.attention import CpuAttention
from engine.core.batch import ForwardBatch
from engine.memory.cache_memory import cleared_cache
from engine.memory.layout import CacheKind
from engine.memory.pools import StagePools
from engine.pipeline.stage_executor import LayerObserver
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.contracts.drafter import Drafter, PoolDrafter
from engine.speculative.drafters.eagle import EagleDrafter, PromptDrafter, SendingDrafter
from engine.speculative.drafters.frozen import FrozenDrafter, FrozenModel
from engine.speculative.drafters.layerwise import LayerwiseDrafter
from engine.speculative.replay.draft_graphs import DraftGraphs
from engine.speculative.replay.recorded_drafts import RecordedDrafts
from engine.speculative.replay.round_graphs import RoundGraphs
from engine.speculative.trees.draft_handoff import HandedChains, HandedEnds
from models.weights_digest import WeightsDigest
from pool.stage.speculation_plan import DraftModelPlan


@dataclass(frozen=True)
class CapturedDraft:
    """The parts of a draft model that run as captured graphs, or as recordings on the host.

    `follows` processes accepted tokens, `rounds` grows trees from them.
    """

    follows: DraftGraphs | None = None
    rounds: RoundGraphs | None = None
    recorded: RecordedDrafts | None = None


CaptureDraft = Callable[[DraftModel, DraftAttention], CapturedDraft]


def build_drafter(
    plan: DraftModelPlan,
    pools: StagePools,
    backends: Backends,
    capture: CaptureDraft = lambda model, attention: CapturedDraft(),
    target_digest: WeightsDigest | None = None,
    digest: WeightsDigest | None = None,
) -> PoolDrafter:
    """Load the draft model, and add its tensors to the digests of target and draft.

    Its cache is that of the stage's extra layers, or its own with as many pages as the target's.
    """
    geometry = pools.geometry
    device = backends.device
    if plan.draft.is_frozen:
        frozen = plan.draft.load_frozen(
            numerics=backends.numerics, device=device, digest=digest, target_digest=target_digest
        )
        return _frozen_drafter(plan, pools, frozen)
    layers = plan.draft.load_layers(
        numerics=backends.numerics, device=device, digest=digest, target_digest=target_digest
    )
    own: dict[CacheKind, dict[int, Tensor]] = {kind: {} for kind in CacheKind}
    for spec in plan.draft.cache_specs(geometry.page_size):
        own[spec.kind][spec.layer_id] = (
            pools.of_kind(spec.kind)[plan.first_layer + spec.layer_id]
            if plan.handed
            else (
                cleared_cache(
                    (geometry.num_pages, *spec.record_shape), getattr(torch, spec.dtype), device
                )
            )
        )
    attention = backends.of_draft(layers[0].attention_geometry(geometry.page_size), own)
    if len(layers) > 1:
        chains = _handed_chains(pools, plan.first_layer) if plan.handed else None
        return LayerwiseDrafter(layers=layers, attention=attention, handed=chains)
    ends = _handed_ends(pools, plan.first_layer) if plan.handed else None
    captured = capture(layers[0], attention)
    return EagleDrafter(
        model=layers[0],
        attention=attention,
        topk=plan.config.topk,
        steps=plan.config.steps,
        handed=ends,
        graphs=captured.follows,
        rounds=captured.rounds,
        recorded=captured.recorded,
    )


def _frozen_drafter(plan: DraftModelPlan, pools: StagePools, frozen: FrozenModel) -> FrozenDrafter:
    """Return the drafter of a draft model that reads the target's cache."""
    kv, windows = (
        {
            layer_id: tensor
            for layer_id, tensor in pools.of_kind(kind).items()
            if layer_id in plan.draft.read_layers
        }
        for kind in (CacheKind.KV, CacheKind.WINDOW)
    )
    cached = CpuAttention(
        kv_pools=kv,
        window_pools=windows,
        geometry=frozen.attention_geometry(pools.geometry.page_size),
    )
    return FrozenDrafter(model=frozen, attention=cached, steps=plan.config.steps)


def _handed_chains(pools: StagePools, layer_id: int) -> HandedChains:
    log_p, tokens = (
        pools.of_kind(kind)[layer_id] for kind in (CacheKind.TOPK_P, CacheKind.TOPK_INDEX)
    )
    return HandedChains(log_p, tokens)


def _handed_ends(pools: StagePools, layer_id: int) -> HandedEnds:
    first = _handed_chains(pools, layer_id)
    hidden = pools.of_kind(CacheKind.DRAFT_HIDDEN)
    keys = pools.of_kind(CacheKind.DRAFT_KEYS)
    return HandedEnds(
        first.topk_p, first.topk_index, hidden[layer_id], keys[layer_id] if keys else None
    )


def role_drafter(
    plan: DraftModelPlan,
    drafter: PoolDrafter,
    observer: LayerObserver | None,
    *,
    speculates: bool,
) -> Drafter:
    """Return the drafter of a pool's roles, with `observer` called for the draft's layers as well.

    A pool that sends prompts has an observer; one that decodes speculates.
    """
    if speculates and (observer is None or not plan.handed):
        return drafter
    layers = sorted({plan.first_layer + spec.layer_id for spec in plan.draft.cache_specs(1)})

    def on_followed(batch: ForwardBatch) -> None:
        if observer is not None:
            for layer_id in layers:
                observer(batch, layer_id)

    return (SendingDrafter if speculates else PromptDrafter)(drafter, on_followed)
