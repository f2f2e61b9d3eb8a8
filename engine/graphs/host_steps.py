"""Recorded steps on the host, one recording per shape of batch.

A recording is made when a shape comes again: of decode and verify steps, and of whole chunks of
prompts.

    the first two   batch ─▶ plan ─▶ the forward
    the third       batch ─▶ plan ─▶ the forward, recorded as it runs
    later ones      batch ─▶ plan ─▶ refill inputs and plan ─▶ replay

Recording takes as long as three to five steps. By the third step, the layers have built what they
build once for all steps.

Nothing is padded: a recording costs hardly more than the step that it records. Its results have
their own memory and are valid until it is replayed.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention import AttentionBackend
from engine.contracts.model import ForwardContext, StageModel, StageOutput
from engine.contracts.recurrent import PlansStates, RecurrentBackend
from engine.core.batch import ForwardBatch, ForwardMode, GraphBucket
from engine.core.draft_trees import SpecInfo
from engine.graphs.recorded import (
    Arena,
    CannotRecordError,
    Recording,
    also_do,
    cannot_record,
    record,
)
from engine.memory.layout import NULL_INDEX

EAGER_FIRST = 2  # steps of a shape that run before it is recorded
MAX_WITH_ADAPTERS = 32  # recordings
MAX_COUNTED = 1024  # shapes

logger = logging.getLogger(__name__)


class OtherShapeError(Exception):
    """The inputs of a step differ from those of its recording. The message names both."""


class _RowLengths(Sequence[int]):
    """Row lengths that a recording must not depend on: reading one stops the recording.

    It is not a tuple, because numpy reads a tuple without calling its methods.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        cannot_record("a forward that reads the lengths of its rows")
        return self._lengths[place]


@dataclass
class RecordedStep:
    """The recording of one step, with the batch, inputs and results of the recorded run.

    The recording reads the tensors and plans of that batch.
    """

    batch: ForwardBatch
    states: object
    given: StageOutput
    result: StageOutput
    recording: Recording


class HostSteps:
    """The recorded steps of one stage.

    The logits that `run` returns are valid until the next `run`.
    """

    plans_share_memory = False

    def __init__(
        self,
        *,
        model: StageModel,
        attention: AttentionBackend,
        recurrent: RecurrentBackend,
        states: PlansStates,
        max_rows: int,
        chunk_tokens: int,
        observer: Callable[[ForwardBatch, int], None] | None = None,
        num_eager: int = EAGER_FIRST,
    ) -> None:
        """Create an object without recordings.

        Steps of up to `max_rows` rows are recorded, and prompt chunks of exactly `chunk_tokens`
        tokens, which most chunks of a long prompt have. The step after the first `num_eager` of a
        shape is recorded. `states` plans for `recurrent`. `observer` is called for each layer when
        it completes; for the recorded step, it is called for all layers at the end.
        """
        self._model = model
        self._attention = attention
        self._states = states
        self._max_rows = max_rows
        self._chunk_tokens = chunk_tokens
        self.observer = observer
        self._running: ForwardBatch | None = None
        self._context = ForwardContext(
            attention, recurrent, None if observer is None else self._layer_done
        )
        self._steps: dict[GraphBucket, RecordedStep] = {}
        self._eager_left: dict[GraphBucket, int] = defaultdict(lambda: num_eager)
        self._arena = Arena()
        self._not_recorded: set[ForwardMode] = set()
        self.num_recorded = 0
        self.num_replays = 0

    def bucket_for(self, batch: ForwardBatch) -> GraphBucket | None:
        """Return the shape of a batch, planned or not, or None if it must run eagerly.

        A shape has sampling rows of equal length, or one whole chunk of a prompt.
        """
        if (
            batch.mode in self._not_recorded
            or batch.scoring
            or any(row.snapshots for row in batch.states)
        ):
            return None
        if batch.mode is ForwardMode.PREFILL:
            is_whole = batch.query_lens == (self._chunk_tokens,)
            return (
                GraphBucket(
                    batch.mode,
                    1,
                    self._chunk_tokens,
                    samples=any(batch.sampling),
                    adapters=batch.adapters,
                )
                if is_whole
                else None
            )
        if (
            batch.mode not in (ForwardMode.DECODE, ForwardMode.VERIFY)
            or not all(batch.sampling)
            or not 0 < batch.num_rows <= self._max_rows
            or len(set(batch.query_lens)) > 1
        ):
            return None
        info = batch.spec_info
        return GraphBucket(
            batch.mode,
            batch.num_rows,
            batch.query_lens[0],
            is_masked=isinstance(info, SpecInfo) and not info.is_chain,
            adapters=batch.adapters,
        )

    def run(self, batch: ForwardBatch, bucket: GraphBucket, given: StageOutput) -> StageOutput:
        """Run the forward of a planned batch for which `bucket_for` returned `bucket`.

        `given` is as in `StageExecutor.run`. Inputs that do not fit the recording run eagerly.
        """
        self._running, step = batch, self._steps.get(bucket)
        if step is not None and step.batch.page_tables.shape[1] >= batch.page_tables.shape[1]:
            try:
                _refill_step(step, batch, self._states.plan(batch), given)
            except OtherShapeError as error:
                logger.warning("a step runs eagerly: %s", error)
                return self._eagerly(batch, given)
            step.recording.replay()
            self.num_replays += 1
            return _handed_on(step.result)
        if len(self._eager_left) > MAX_COUNTED:  # every mix of adapters is a shape of its own
            self._eager_left.clear()
        if self._eager_left[bucket]:
            self._eager_left[bucket] -= 1
            return self._eagerly(batch, given)
        return self._recorded(batch, bucket, given)

    def forget_adapter(self, adapter: str) -> None:
        """Implement `Replays.forget_adapter`. Another thread may run a step meanwhile."""
        steps = list(self._steps.items())
        self._steps = {bucket: step for bucket, step in steps if adapter not in bucket.adapters}

    def _layer_done(self, layer_id: int) -> None:
        if self.observer is not None and self._running is not None:
            self.observer(self._running, layer_id)

    def _eagerly(self, batch: ForwardBatch, given: StageOutput) -> StageOutput:
        return self._model.forward(batch, given.hidden, self._context, given.aux_hidden)

    def _recorded(
        self, batch: ForwardBatch, bucket: GraphBucket, given: StageOutput
    ) -> StageOutput:
        """Run and record the batch, with page tables that have room for up to twice the pages."""
        own = replace(
            batch,
            plan_mark=None,
            states=(),
            positions=batch.positions.clone(),
            token_ids=None if batch.token_ids is None else batch.token_ids.clone(),
            page_tables=with_room(batch.page_tables),
        )
        given = _handed_on(given)
        self._attention.plan(own)
        states = self._states.plan(own)
        results = list[StageOutput]()
        layers = list[int]()
        watch_lengths(own)

        def note_layer(layer_id: int) -> None:
            layers.append(layer_id)
            also_do(partial(self._layer_done, layer_id))

        context = replace(
            self._context, on_layer_done=None if self.observer is None else note_layer
        )
        try:
            recording = record(
                lambda: results.append(
                    self._model.forward(own, given.hidden, context, given.aux_hidden)
                ),
                self._arena,
            )
        except CannotRecordError as error:
            logger.info("%s steps are not recorded: %s", batch.mode, error)
            self._not_recorded.add(batch.mode)
        else:
            self._keep(bucket, RecordedStep(own, states, given, results[0], recording))
        for layer_id in layers:
            self._layer_done(layer_id)
        return _handed_on(results[0])

    def _keep(self, bucket: GraphBucket, step: RecordedStep) -> None:
        """Keep a recording. Of those with adapters the oldest goes if there are too many."""
        self._steps[bucket] = step
        self.num_recorded += 1
        with_adapters = [each for each in list(self._steps) if each.adapters]
        if len(with_adapters) > MAX_WITH_ADAPTERS:
            self._steps.pop(with_adapters[0], None)


def watch_lengths(batch: ForwardBatch) -> None:
    """Make a recording fail if it reads the context lengths of this planned batch."""
    batch.context_lens = cast("tuple[int, ...]", _RowLengths(batch.context_lens))


def _handed_on(output: StageOutput) -> StageOutput:
    """Return the output with copies of the tensors that are sent while the next step may run."""
    return replace(
        output,
        hidden=None if output.hidden is None else output.hidden.clone(),
        aux_hidden={layer_id: hidden.clone() for layer_id, hidden in output.aux_hidden.items()},
    )


def _refill_step(
    step: RecordedStep, batch: ForwardBatch, states: object, given: StageOutput
) -> None:
    """Fill the recording's inputs with those of `batch`.

    Raises:
        OtherShapeError: they do not fit.
    """
    for kept, new in (
        (step.batch.token_ids, batch.token_ids),
        (step.batch.positions, batch.positions),
        (step.given.hidden, given.hidden),
        (step.given.aux_hidden, given.aux_hidden),
        (step.states, states),
        (step.batch.forward_metadata_plan, batch.forward_metadata_plan),
    ):
        refill(kept, new)


def with_room(page_tables: Tensor) -> Tensor:
    """Return a copy of `page_tables` [R, P] with room for up to twice the pages per row.

    The additional entries are the null page.
    """
    width = page_tables.shape[1]
    return F.pad(page_tables, (0, (1 << width.bit_length()) - width), value=NULL_INDEX)


def refill(kept: object, new: object) -> None:
    """Copy the values of `new` into the tensors of `kept`.

    The tensors may be within dataclasses and dictionaries. Page tables in `new` may be narrower.
    Everything else must be equal.

    Raises:
        OtherShapeError: something differs. The values before it have been copied.
    """
    if isinstance(kept, Tensor):
        if not isinstance(new, Tensor) or not _are_alike(kept, new):
            raise OtherShapeError(f"recorded with {_described(kept)}, got {_described(new)}")
        (kept if kept.shape == new.shape else kept[:, : new.shape[1]]).copy_(new)
    elif type(kept) is type(new) and is_dataclass(kept):
        for name in kept.__dataclass_fields__:
            refill(getattr(kept, name), getattr(new, name))
    elif isinstance(kept, dict) and isinstance(new, dict) and kept.keys() == new.keys():
        for name, value in kept.items():
            refill(value, new[name])
    elif kept != new:
        raise OtherShapeError(f"recorded with {_described(kept)}, got {_described(new)}")


def _are_alike(kept: Tensor, new: Tensor) -> bool:
    """Return whether both have one dtype and shape, or are tables of as many rows.

    A new table may be narrower.
    """
    is_table = kept.dtype is torch.int32 and kept.dim() == new.dim() == 2
    return kept.dtype is new.dtype and (
        kept.shape == new.shape
        or (is_table and len(kept) == len(new) and kept.shape[1] > new.shape[1])
    )


def _described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
