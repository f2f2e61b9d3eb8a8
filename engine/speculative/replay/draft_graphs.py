"""Captured forwards in which a draft follows the accepted tokens.

They work as in `engine/graphs/runner.py`, but a draft has only pages. The steps that extend its
trees are captured in `engine/speculative/replay/round_graphs.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.contracts.model import ForwardContext
from engine.core.batch import ForwardBatch, GraphBucket
from engine.core.numerics import use_in_this_thread
from engine.graphs import buckets as shapes
from engine.graphs.capture import Capture
from engine.graphs.runner import CapturedForward, GraphAttention
from engine.memory.static import StaticInts
from engine.speculative.contracts.draft_model import DraftModel


class DraftGraphs:
    """The captured forwards of one draft over its pages."""

    def __init__(
        self,
        *,
        model: DraftModel,
        attention: GraphAttention,
        context: ForwardContext,
        buckets: Sequence[GraphBucket],
        capture: Capture,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Reserve memory for all buckets. `capture_all` captures them.

        `context` is that of the draft over its pages, `width` the size of its features.
        """
        self._model = model
        self._attention = attention
        self._context = context
        self._buckets = sorted(buckets, key=lambda bucket: bucket.num_tokens, reverse=True)
        self._capture = capture
        self._device = device
        longest = self._buckets[0].num_tokens
        self._inputs = StaticInts({"token_ids": longest, "positions": longest}, device)
        self._features = torch.full((longest, width), float("nan"), dtype=dtype, device=device)
        self._hidden = torch.empty_like(self._features)
        self._captured: dict[GraphBucket, CapturedForward] = {}
        attention.reserve(self._buckets)

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every bucket.

        Raises:
            ConfigError: a bucket could not be captured; the message names it.
        """
        use_in_this_thread(self._device)
        for bucket in self._buckets:
            self._captured[bucket] = self._captured_forward(bucket)

    def bucket_for(self, batch: ForwardBatch) -> GraphBucket | None:
        """Return the bucket of a batch, as `StageGraphs.bucket_for` does."""
        return shapes.bucket_for(batch, self._captured)

    def run(self, batch: ForwardBatch, bucket: GraphBucket, features: Tensor) -> Tensor:
        """Run `DraftModel.forward` on a host batch for which `bucket_for` returned `bucket`.

        `features` is [n, width] on the device.
        """
        padded = shapes.pad_batch(batch, bucket)
        count = batch.num_tokens
        self._attention.plan(padded)
        assert batch.token_ids is not None, "a draft reads tokens"
        self._inputs.refill({"token_ids": batch.token_ids, "positions": batch.positions})
        self._features[:count] = features
        self._features[count : bucket.num_tokens] = float("nan")  # not those of an earlier batch
        self._captured[bucket].replay(padded)
        return self._hidden[:count].clone()

    def _captured_forward(self, bucket: GraphBucket) -> CapturedForward:
        count = bucket.num_tokens
        batch = shapes.padding_alone(bucket)
        batch.token_ids = self._inputs["token_ids"][:count]
        batch.positions = self._inputs["positions"][:count]
        self._attention.plan(batch)

        def forward() -> None:
            self._hidden[:count] = self._model.forward(batch, self._features[:count], self._context)

        return CapturedForward(
            self._attention, batch, self._capture.capture(f"the draft's {bucket}", forward)
        )
