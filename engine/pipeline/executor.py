"""Runs one stage's layers on a batch: plan if the batch says so, then forward. Knows no neighbours."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.contracts.attention import AttentionBackend
from engine.contracts.latent import LatentAttentionBackend
from engine.contracts.model import ForwardContext, StageModel, StageOutput
from engine.contracts.recurrent import RecurrentBackend
from engine.core.batch import ForwardBatch, ForwardMode, plan_where_needed
from engine.core.placement import HOST, use_in_this_thread
from engine.graphs.runner import StageGraphs
from runtime.errors import ConfigError, InternalError

LayerObserver = Callable[[ForwardBatch, int], None]


class Commits(Protocol):
    """A cache that verification leaves with entries of nodes, of which the accepted ones must move to their place."""

    def commit(self, batch: ForwardBatch) -> None:
        """Move what the batch's rows accepted of their previous step (`SpecRow.accepted`)."""
        ...


class StageExecutor:
    """One stage's model with its backends. `on_layer_done(batch, layer_id)` is told of each layer as it completes;
    `caches` commit what earlier verifications accepted before a batch runs. `graphs` take the batches that they were
    captured for."""

    def __init__(self, *, model: StageModel, attention: AttentionBackend | None, recurrent: RecurrentBackend,
                 latent_attention: LatentAttentionBackend | None = None, caches: Sequence[Commits] = (),
                 on_layer_done: LayerObserver | None = None, device: torch.device = HOST,
                 graphs: StageGraphs | None = None) -> None:
        """Exactly one of `attention` and `latent_attention` is given: the kind the model's layers have."""
        planner = attention if attention is not None else latent_attention
        if planner is None:
            raise ConfigError("a model without any attention layer is not supported", field="model")
        if graphs is not None and on_layer_done is not None:
            raise InternalError("the layers of a captured forward cannot be heard of one by one")
        self.model = model
        self._graphs = graphs
        self._caches = caches
        self._planner = planner
        self._attention = attention
        self._latent_attention = latent_attention
        self._recurrent = recurrent
        self._on_layer_done = on_layer_done
        self._device = device
        self.num_plans = 0
        self.num_forwards = {"graph": 0, "eager": 0}

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, incoming: StageOutput | None = None) -> StageOutput:
        """Hidden states for the next stage, or logits of the drawing rows from the last. `incoming` is what the stage
        before handed on; None on the first. PREBUILT batches pass through: their prompts were computed elsewhere."""
        if batch.mode is ForwardMode.PREBUILT:
            return StageOutput()
        use_in_this_thread(self._device)
        for cache in self._caches:
            cache.commit(batch)
        given = (incoming or StageOutput()).to(self._device)
        bucket = None if self._graphs is None else self._graphs.bucket_for(batch)
        self.num_forwards["eager" if bucket is None else "graph"] += 1
        if self._graphs is not None and bucket is not None:
            self.num_plans += 1
            return self._graphs.run(batch, bucket, given)
        self.num_plans += plan_where_needed(batch, self._planner)
        observer = self._on_layer_done
        done = None if observer is None else lambda layer_id: observer(batch, layer_id)
        context = ForwardContext(self._attention, self._recurrent, done, self._latent_attention)
        return self.model.forward(batch, given.hidden, context, given.aux_hidden, given.selected_keys)
