"""Captured forwards of a stage: padded to a bucket, planned again, and replayed.

    capture   per bucket: a batch of padding, planned and marked ─▶ warm-up
              ─▶ the forward, recorded
    replay    batch ─▶ pad ─▶ plan on the bucket's wrapper ─▶ refill inputs
              ─▶ check the plan ─▶ replay ─▶ real rows

A replay does not read the batch. Its inputs are in memory with fixed addresses that is refilled
before each replay, and its plan is in the buffers of the bucket's wrapper. A plan serves one
replay, so no replay can use the plan of an earlier one.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.contracts.attention import AttentionBackend
from engine.contracts.model import ForwardContext, StageModel, StageOutput
from engine.contracts.recurrent import RecurrentBackend
from engine.core.batch import ForwardBatch, GraphBucket
from engine.core.numerics import use_in_this_thread
from engine.graphs import buckets as shapes
from engine.graphs.capture import Capture, Graph
from engine.memory.static import StaticInts
from engine.sampling.sampler import wanted_tokens
from runtime.errors import StalePlanError

logger = logging.getLogger(__name__)


class GraphAttention(AttentionBackend, Protocol):
    """Attention that supports capture."""

    def reserve(self, buckets: Sequence[GraphBucket]) -> None:
        """Reserve memory per bucket. Batches padded to it are planned there from now on."""
        ...

    def check_current(self, batch: ForwardBatch) -> object:
        """Return the plan of a batch that the memory of its bucket still holds.

        Raises:
            StalePlanError: the memory holds another plan.
        """
        ...


class GraphRecurrent(RecurrentBackend, Protocol):
    """Recurrent layers that support capture."""

    def reserve(self, buckets: Sequence[GraphBucket]) -> None:
        """Reserve memory per bucket, as `GraphAttention.reserve` does."""
        ...

    def prepare(self, batch: ForwardBatch) -> None:
        """Write the inputs that the batch's forward reads, before the forward."""
        ...


class Replays(Protocol):
    """Forwards of a stage that are replayed, from graphs or recordings."""

    @property
    def plans_share_memory(self) -> bool:
        """Return whether the next batch may be planned only after the previous one has run."""
        ...

    @property
    def observer(self) -> Callable[[ForwardBatch, int], None] | None:
        """Return the callback for each completed layer, or None."""
        ...

    def bucket_for(self, batch: ForwardBatch) -> GraphBucket | None:
        """Return the bucket to run the batch in, or None if it must run eagerly."""
        ...

    def run(self, batch: ForwardBatch, bucket: GraphBucket, given: StageOutput) -> StageOutput:
        """Run the forward of a batch for which `bucket_for` returned `bucket`.

        `given` is as in `StageExecutor.run`. Logits are valid until the next `run`.
        """
        ...

    def forget_adapter(self, adapter: str) -> None:
        """Drop the forwards of batches with this adapter."""
        ...


@dataclass
class CapturedForward:
    """One bucket's graph and the batch it was captured with.

    The mark of that batch is the one of the latest plan.
    """

    attention: GraphAttention
    batch: ForwardBatch
    graph: Graph

    def replay(self, planned: ForwardBatch) -> None:
        """Replay with the plan of `planned`, a batch padded to the same bucket.

        Raises:
            StalePlanError: the plan is missing, was replaced, or has served a replay.
        """
        if planned.graph_bucket != self.batch.graph_bucket:
            raise StalePlanError(
                f"captured for {self.batch.graph_bucket}, planned for {planned.graph_bucket}"
            )
        plan = self.attention.check_current(planned)
        if plan is self.batch.forward_metadata_plan:
            raise StalePlanError("a plan serves one replay, and this one was used")
        self.batch.mark_forward_metadata_ready(self.attention, plan=plan)
        self.graph.replay()


class StageGraphs:
    """The captured forwards of one stage.

    The logits that `run` returns are valid until the next `run`.
    """

    plans_share_memory = True

    def __init__(
        self,
        *,
        model: StageModel,
        attention: GraphAttention,
        recurrent: GraphRecurrent,
        buckets: Sequence[GraphBucket],
        capture: Capture,
        device: torch.device,
        observer: Callable[[ForwardBatch, int], None] | None = None,
    ) -> None:
        """Reserve memory for all buckets. `capture_all` captures them.

        `observer` is for layers of prompts only. It is never called, because prompts are not
        captured.
        """
        self.observer = observer
        self._model = model
        self._attention = attention
        self._recurrent = recurrent
        self._context = ForwardContext(attention, recurrent)
        # The largest comes first. Smaller ones then fit into the memory that it has left in the
        # pool.
        self._buckets = sorted(buckets, key=lambda bucket: bucket.num_tokens, reverse=True)
        self._capture = capture
        self._device = device
        longest = self._buckets[0].num_tokens
        self._inputs = StaticInts({"token_ids": longest, "positions": longest}, device)
        self._hidden: Tensor | None = None
        if model.layer_range.start:
            self._hidden = torch.full(
                (longest, model.facts.hidden_size),
                float("nan"),
                device=device,
                dtype=getattr(torch, model.facts.dtype),
            )
        self._outputs: dict[str | int, Tensor] = {}
        self._captured: dict[GraphBucket, CapturedForward] = {}
        attention.reserve(self._buckets)
        recurrent.reserve(self._buckets)

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every bucket.

        Raises:
            ConfigError: a bucket could not be captured; the message names it.
        """
        use_in_this_thread(self._device)
        for bucket in self._buckets:
            self._captured[bucket] = self._captured_forward(bucket)
        logger.info("captured %d graphs, up to %s", self.num_captured, self._buckets[0])

    def bucket_for(self, batch: ForwardBatch) -> GraphBucket | None:
        """Return the captured bucket to run a batch in, or None if it must run eagerly.

        Larger batches, prompts and planned batches run eagerly.
        """
        return shapes.bucket_for(batch, self._captured)

    def forget_adapter(self, adapter: str) -> None:
        """Implement `Replays.forget_adapter`: batches with adapters are not captured."""

    def run(self, batch: ForwardBatch, bucket: GraphBucket, given: StageOutput) -> StageOutput:
        """Run the forward of a batch for which `bucket_for` returned `bucket`.

        `given` is as in `StageExecutor.run`, on the device.
        """
        padded = shapes.pad_batch(batch, bucket)
        self._plan(padded)
        tokens = {} if batch.token_ids is None else {"token_ids": batch.token_ids}
        self._inputs.refill({**tokens, "positions": batch.positions})
        if self._hidden is not None and given.hidden is not None:
            self._hidden[: batch.num_tokens] = given.hidden
            # NaN, so that padding cannot use values of an earlier batch.
            self._hidden[batch.num_tokens : bucket.num_tokens] = float("nan")
        self._captured[bucket].replay(padded)
        return self._results(batch, given)

    def _captured_forward(self, bucket: GraphBucket) -> CapturedForward:
        count = bucket.num_tokens
        batch = shapes.padding_alone(bucket)
        batch.positions = self._inputs["positions"][:count]
        batch.token_ids = self._inputs["token_ids"][:count] if self._hidden is None else None
        hidden = None if self._hidden is None else self._hidden[:count]
        self._plan(batch)

        def forward() -> None:
            for name, result in _parts(self._model.forward(batch, hidden, self._context)).items():
                self._outputs[name][:count] = result

        if not self._outputs:
            sample = _parts(self._model.forward(batch, hidden, self._context))
            self._outputs = {name: torch.empty_like(result) for name, result in sample.items()}
        return CapturedForward(self._attention, batch, self._capture.capture(str(bucket), forward))

    def _plan(self, batch: ForwardBatch) -> None:
        self._attention.plan(batch)
        self._recurrent.prepare(batch)

    def _results(self, batch: ForwardBatch, given: StageOutput) -> StageOutput:
        """Return the results of the batch's rows.

        Hidden states are copied, because the next replay may begin before they are sent.
        """
        count = batch.num_tokens
        handed = dict(given.aux_hidden)
        for name, result in self._outputs.items():
            if isinstance(name, int):
                handed[name] = result[:count].clone()
        hidden = self._outputs.get("hidden")
        logits = self._outputs.get("logits")
        if logits is None:
            return StageOutput(
                hidden=None if hidden is None else hidden[:count].clone(), aux_hidden=handed
            )
        wanted = wanted_tokens(batch)
        if len(wanted) == count:
            return StageOutput(logits=logits[:count], aux_hidden=handed)
        return StageOutput(
            logits=logits[torch.tensor(wanted, dtype=torch.long).to(self._device)],
            aux_hidden=handed,
        )


def _parts(output: StageOutput) -> dict[str | int, Tensor]:
    """Return the outputs of a forward by name; those captured for a draft by layer id."""
    parts: dict[str | int, Tensor | None] = {"hidden": output.hidden, "logits": output.logits}
    for layer_id, hidden in output.aux_hidden.items():
        parts[layer_id] = hidden
    return {name: part for name, part in parts.items() if part is not None}
