"""The backends of a stage and of a draft, independent of the device: protocol and builder."""

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
from engine.pipeline.stage_executor import Commits, LayerObserver, StageExecutor
from engine.speculative.attention.draft_attention import DraftAttention

DraftPools = Mapping[CacheKind, Mapping[int, Tensor]]  # by kind and the draft's own layer ids


@dataclass(frozen=True)
class StageCaches:
    """The pool tensors of the target's layers that a stage's backends use.

    A draft's pools are excluded, because a verification does not move them.
    """

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
    """Backends that support capture, and the `Capture` to use."""

    attention: GraphAttention
    recurrent: GraphRecurrent
    capture: Capture
    device: torch.device


@dataclass(frozen=True)
class StageBackends:
    """The backends of one stage.

    `caches` has those that commit accepted nodes; it is empty if nothing is verified. `capturable`
    has the same backends for graphs, or None without support. `states` plans for recurrent layers
    if decode steps can be recorded on the host, else None.
    """

    attention: AttentionBackend | None
    latent_attention: LatentAttentionBackend | None
    recurrent: RecurrentBackend
    caches: tuple[Commits, ...] = ()
    capturable: Capturable | None = None
    states: PlansStates | None = None

    def with_snapshots(self, caches: StageCaches) -> Self:
        """Return backends that also follow the state instructions of batches.

        A stage without recurrent layers keeps its backends.
        """
        if not caches.state:
            return self
        states = SnapshotRecurrent(self.recurrent, conv_pools=caches.conv, state_pools=caches.state)
        return replace(self, recurrent=states, caches=(*self.caches, states))


class Backends(Protocol):
    """A builder of backends for one kind of device."""

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
        """Build the backends over a stage's caches.

        The geometries describe the whole model. If `max_nodes` is not 0, the backends also verify
        trees of up to `max_nodes` nodes per row. Recurrent layers then keep their states in
        `num_scratch` records, including the null record.
        """
        ...

    def of_draft(
        self, geometry: AttentionGeometry | LatentGeometry, pools: DraftPools
    ) -> DraftAttention:
        """Build the attention of a draft over its pools."""
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
