"""The forward of one stage's layers on a batch, independent of other stages."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.contracts.attention import AttentionBackend
from engine.contracts.latent import LatentAttentionBackend
from engine.contracts.model import ForwardContext, StageModel, StageOutput
from engine.contracts.recurrent import RecurrentBackend
from engine.core.batch import ForwardBatch, ForwardMode, plan_where_needed
from engine.core.numerics import HOST, use_in_this_thread
from engine.graphs.runner import Replays
from engine.pipeline.overlap import Overlap, after_both
from runtime.errors import ConfigError, InternalError

LayerObserver = Callable[[ForwardBatch, int], None]


class Commits(Protocol):
    """A cache that holds entries of verified nodes and must move the accepted ones into place."""

    def commit(self, batch: ForwardBatch) -> None:
        """Move the entries that the rows accepted in their previous step (`SpecRow.accepted`)."""
        ...


class StageExecutor:
    """One stage's model with its backends.

    `on_layer_done(batch, layer_id)` is called for each layer as it completes. `caches` commit the
    nodes that earlier verifications accepted, before a batch runs. `graphs` run the batches that
    they have a bucket for.
    """

    def __init__(
        self,
        *,
        model: StageModel,
        attention: AttentionBackend | None,
        recurrent: RecurrentBackend,
        latent_attention: LatentAttentionBackend | None = None,
        caches: Sequence[Commits] = (),
        on_layer_done: LayerObserver | None = None,
        device: torch.device = HOST,
        graphs: Replays | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        """Create an executor with exactly one of `attention` and `latent_attention`.

        It must be the kind that the model's layers have. `overlap` runs batches in two halves, or
        is None.

        Raises:
            ConfigError: the model has no attention layer.
            InternalError: `graphs` and the executor have different observers.
        """
        planner = attention if attention is not None else latent_attention
        if planner is None:
            raise ConfigError("a model without any attention layer is not supported", field="model")
        if graphs is not None and graphs.observer is not on_layer_done:
            raise InternalError(
                "the layer observer differs from the one that captured forwards call"
            )
        self.model = model
        self._graphs = graphs
        self._caches = caches
        self._planner = planner
        self._attention = attention
        self._latent_attention = latent_attention
        self._recurrent = recurrent
        self._on_layer_done = on_layer_done
        self._device = device
        self._overlap = overlap
        self.num_plans = 0
        self.num_forwards = {"graph": 0, "eager": 0, "halves": 0, "idle": 0}

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, incoming: StageOutput | None = None) -> StageOutput:
        """Return the hidden states for the next stage, or the last stage's logits of sampling rows.

        `incoming` is the output of the previous stage, or None on the first. The prompts of a
        PREBUILT batch were computed elsewhere. PREBUILT and idle batches only take part in the
        forwards of other data ranks, and return an empty output.
        """
        if batch.mode in (ForwardMode.PREBUILT, ForwardMode.IDLE):
            idle = batch.inner_idle if batch.mode is ForwardMode.PREBUILT else batch
            if idle is not None:
                self.num_forwards["idle"] += 1
                self.model.forward(
                    idle,
                    None,
                    ForwardContext(self._attention, self._recurrent, None, self._latent_attention),
                )
            return StageOutput()
        if self._device != HOST:
            use_in_this_thread(self._device)
        for cache in self._caches:
            cache.commit(batch)
        given = (incoming or StageOutput()).to(self._device)
        bucket = None if self._graphs is None else self._graphs.bucket_for(batch)
        if self._graphs is not None and bucket is not None:
            self.num_forwards["graph"] += 1
            if self._graphs.plans_share_memory:
                self.num_plans += 1
            else:
                self.num_plans += plan_where_needed(batch, self._planner)
            return self._graphs.run(batch, bucket, given)
        observer = self._on_layer_done
        done = None if observer is None else lambda layer_id: observer(batch, layer_id)
        middle = None if self._overlap is None else self._overlap.middle(batch)
        self.num_forwards["eager" if middle is None else "halves"] += 1
        if self._overlap is None or middle is None:
            return self._forward(batch, given, done)
        first, second = batch.split(middle)
        given_first, given_second = given.split(first.num_tokens)
        both_done = None if done is None else after_both(done)
        return self._overlap.run(
            lambda: self._forward(first, given_first, both_done),
            lambda: self._forward(second, given_second, both_done),
        )

    def forget_adapter(self, adapter: str) -> None:
        """Drop the recorded forwards of batches with this adapter."""
        if self._graphs is not None:
            self._graphs.forget_adapter(adapter)

    @torch.inference_mode()
    def plan_ahead(self, batch: ForwardBatch) -> None:
        """Plan and mark a batch while another one may run, unless plans share memory.

        Device plans are in buffers that the running batch reads. For those, `run` plans after it.
        """
        shares = self._device != HOST or (
            self._graphs is not None and self._graphs.plans_share_memory
        )
        if not shares and batch.mode not in (ForwardMode.PREBUILT, ForwardMode.IDLE):
            self.num_plans += plan_where_needed(batch, self._planner)

    @torch.inference_mode()
    def _forward(
        self, batch: ForwardBatch, given: StageOutput, done: Callable[[int], None] | None
    ) -> StageOutput:
        self.num_plans += plan_where_needed(batch, self._planner)
        context = ForwardContext(self._attention, self._recurrent, done, self._latent_attention)
        return self.model.forward(
            batch, given.hidden, context, given.aux_hidden, given.selected_keys
        )
