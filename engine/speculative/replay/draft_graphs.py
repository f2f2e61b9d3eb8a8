"""The forward by which a draft follows what was accepted, as captured graphs. All as in
`engine/graphs/runner.py`, but that a draft has pages only. The steps that grow its trees are
`engine/speculative/replay/round_graphs.py`'s."""

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
        """`context` is what the draft runs on over its pages, `width` that of its features. Nothing
        is captured before `capture_all`."""
        self._model, self._attention, self._context = model, attention, context
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
        """Capture every bucket. Raises ConfigError naming the one that could not be."""
        use_in_this_thread(self._device)
        for bucket in self._buckets:
            self._captured[bucket] = self._captured_forward(bucket)

    def bucket_for(self, batch: ForwardBatch) -> GraphBucket | None:
        """See `StageGraphs.bucket_for`."""
        return shapes.bucket_for(batch, self._captured)

    def run(self, batch: ForwardBatch, bucket: GraphBucket, features: Tensor) -> Tensor:
        """`DraftModel.forward` of a batch on the host that `bucket_for` found this bucket for;
        features [n, width] on the device."""
        padded, count = shapes.pad_batch(batch, bucket), batch.num_tokens
        self._attention.plan(padded)
        assert batch.token_ids is not None, "a draft reads tokens"
        self._inputs.refill({"token_ids": batch.token_ids, "positions": batch.positions})
        self._features[:count] = features
        self._features[count : bucket.num_tokens] = float("nan")  # not those of an earlier batch
        self._captured[bucket].replay(padded)
        return self._hidden[:count].clone()

    def _captured_forward(self, bucket: GraphBucket) -> CapturedForward:
        count, batch = bucket.num_tokens, shapes.padding_alone(bucket)
        batch.token_ids, batch.positions = (
            self._inputs["token_ids"][:count],
            self._inputs["positions"][:count],
        )
        self._attention.plan(batch)

        def forward() -> None:
            self._hidden[:count] = self._model.forward(batch, self._features[:count], self._context)

        return CapturedForward(
            self._attention, batch, self._capture.capture(f"the draft's {bucket}", forward)
        )
