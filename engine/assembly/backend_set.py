"""What the layers of a stage and of a draft run on, whatever the device: the contract, and what is
built by it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from engine.backends.recurrent_batch import SnapshotRecurrent
from engine.contracts.attention import AttentionBackend, AttentionGeometry
from engine.contracts.latent import LatentAttentionBackend, LatentGeometry
from engine.contracts.model import StageModel
from engine.contracts.recurrent import PlansStates, RecurrentBackend
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from engine.graphs.capture import Capture
from engine.graphs.runner import GraphAttention, GraphRecurrent, Replays
from engine.memory.layout import CacheKind
from engine.memory.pools import StagePools
from engine.pipeline.overlap import Overlap
from engine.pipeline.stages import Commits, LayerObserver, StageExecutor
from engine.speculative.attention.draft_attention import DraftAttention

DraftPools = Mapping[CacheKind, Mapping[int, Tensor]]  # by kind and the draft's own layer ids


@dataclass(frozen=True)
class StageCaches:
    """What a stage's backends are built over: the pools' tensors of the target's layers. A draft's
    are not what a verification moves."""

    kv: Mapping[int, Tensor]
    latent: Mapping[int, Tensor]
    index_key: Mapping[int, Tensor]
    conv: Mapping[int, Tensor]
    state: Mapping[int, Tensor]
    window: Mapping[int, Tensor]

    @classmethod
    def of_layers(cls, pools: StagePools, layers: LayerRange) -> "StageCaches":
        kinds = (
            CacheKind.KV,
            CacheKind.LATENT,
            CacheKind.INDEX_KEY,
            CacheKind.CONV,
            CacheKind.STATE,
            CacheKind.WINDOW,
        )
        return cls(
            *(
                {
                    layer_id: tensor
                    for layer_id, tensor in pools.of_kind(kind).items()
                    if layer_id in layers
                }
                for kind in kinds
            )
        )


@dataclass(frozen=True)
class Capturable:
    """Backends whose forwards can be captured, and what captures them."""

    attention: GraphAttention
    recurrent: GraphRecurrent
    capture: Capture
    device: torch.device


@dataclass(frozen=True)
class StageBackends:
    """`caches`: those that commit what a verification accepted; none where nothing is verified.
    `capturable`: the same backends as graphs see them; None where they cannot be captured. `states`
    plans for recurrent layers where decode steps can be recorded on the host; None where they
    cannot."""

    attention: AttentionBackend | None
    latent_attention: LatentAttentionBackend | None
    recurrent: RecurrentBackend
    caches: tuple[Commits, ...] = ()
    capturable: Capturable | None = None
    states: PlansStates | None = None

    def with_snapshots(self, caches: StageCaches) -> Self:
        """The same, and where the stage has recurrent layers they do what batches say about
        states."""
        if not caches.state:
            return self
        states = SnapshotRecurrent(self.recurrent, conv_pools=caches.conv, state_pools=caches.state)
        return replace(self, recurrent=states, caches=(*self.caches, states))


class Backends(Protocol):
    """Builds what layers run on, all of one kind."""

    @property
    def device(self) -> torch.device: ...

    @property
    def numerics(self) -> Numerics: ...

    def of_stage(
        self,
        caches: StageCaches,
        geometry: AttentionGeometry | None,
        latent: LatentGeometry | None,
        *,
        max_nodes: int,
        num_scratch: int,
    ) -> StageBackends:
        """Over a stage's caches; the geometries are those of the whole model. With `max_nodes` they
        also verify trees of so many nodes per row; recurrent layers keep their states in
        `num_scratch` records, the null one included."""
        ...

    def of_draft(
        self, geometry: AttentionGeometry | LatentGeometry, pools: DraftPools
    ) -> DraftAttention:
        """Over a draft's pools."""
        ...


def build_executor(
    model: StageModel,
    backends: StageBackends,
    device: torch.device,
    observer: LayerObserver | None,
    graphs: Replays | None = None,
    overlap: Overlap | None = None,
) -> StageExecutor:
    return StageExecutor(
        model=model,
        attention=backends.attention,
        latent_attention=backends.latent_attention,
        recurrent=backends.recurrent,
        caches=backends.caches,
        on_layer_done=observer,
        device=device,
        graphs=graphs,
        overlap=overlap,
    )
