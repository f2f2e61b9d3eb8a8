"""Decode and verify steps on the host as recordings, one for each shape of batch, made when such a step comes again.

    the first two   batch ─▶ plan ─▶ the forward
    the third       batch ─▶ plan ─▶ the forward, recorded as it runs
    later ones      batch ─▶ plan ─▶ refill inputs and plan ─▶ replay

To record takes as long as three to five steps, and what layers make once for all steps is there by then.

Nothing is padded: a recording costs hardly more than the step that it is made of. Its results lie in memory of its own
and are valid until it is replayed.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention import AttentionBackend
from engine.contracts.model import ForwardContext, StageModel, StageOutput
from engine.contracts.recurrent import PlansStates, RecurrentBackend
from engine.core.batch import ForwardBatch, ForwardMode, GraphBucket
from engine.core.draft_trees import SpecInfo
from engine.graphs.recorded import Arena, CannotRecordError, Recording, record
from engine.memory.layout import NULL_INDEX

EAGER_FIRST = 2  # steps of a shape before it is recorded

logger = logging.getLogger(__name__)


class OtherShapeError(Exception):
    """What a step is given is not what it was recorded with; the message has both."""


class _Withheld(tuple[int, ...]):
    """In place of what a recording must not depend on."""

    __slots__ = ()

    def __iter__(self) -> Iterator[int]:
        raise CannotRecordError("a forward that reads how long its rows are")

    def __getitem__(self, place: object) -> NoReturn:
        raise CannotRecordError("a forward that reads how long a row is")


@dataclass
class RecordedStep:
    """The batch that a step was recorded with, whose tensors and plans the recording reads, what it had from the stage
    before, and what it gave."""

    batch: ForwardBatch
    states: object
    given: StageOutput
    result: StageOutput
    recording: Recording


class HostSteps:
    """The recorded steps of one stage. What `run` returns as logits is valid until the next `run`."""

    plans_share_memory = False

    def __init__(self, *, model: StageModel, attention: AttentionBackend, recurrent: RecurrentBackend,
                 states: PlansStates, max_rows: int, num_eager: int = EAGER_FIRST) -> None:
        """Batches of up to `max_rows` rows are recorded, of each shape the one after `num_eager`. `states` plans for
        `recurrent`."""
        self._model, self._attention, self._states, self._max_rows = model, attention, states, max_rows
        self._context = ForwardContext(attention, recurrent)
        self._steps: dict[GraphBucket, RecordedStep] = {}
        self._eager_left: dict[GraphBucket, int] = defaultdict(lambda: num_eager)
        self._arena = Arena()
        self._is_off = False
        self.num_recorded, self.num_replays = 0, 0

    def bucket_for(self, batch: ForwardBatch) -> GraphBucket | None:
        """The shape of a batch, planned or not, whose rows are of one length and draw; None for what runs eagerly."""
        is_plain = (batch.mode in (ForwardMode.DECODE, ForwardMode.VERIFY) and not batch.scoring and all(batch.sampling)
                    and not any(row.snapshots for row in batch.states))
        if self._is_off or not is_plain or not 0 < batch.num_rows <= self._max_rows or len(set(batch.query_lens)) > 1:
            return None
        info = batch.spec_info
        return GraphBucket(batch.mode, batch.num_rows, batch.query_lens[0],
                           is_masked=isinstance(info, SpecInfo) and not info.is_chain)

    def run(self, batch: ForwardBatch, bucket: GraphBucket, given: StageOutput) -> StageOutput:
        """The forward of a planned batch that `bucket_for` found this bucket for. `given` as in `StageExecutor.run`.

        What its recording does not fit runs eagerly."""
        step = self._steps.get(bucket)
        if step is not None and step.batch.page_tables.shape[1] >= batch.page_tables.shape[1]:
            try:
                _refill_step(step, batch, self._states.plan(batch), given)
            except OtherShapeError as error:
                logger.warning("a step runs eagerly: %s", error)
                return self._eagerly(batch, given)
            step.recording.replay()
            self.num_replays += 1
            return _handed_on(step.result)
        if self._eager_left[bucket]:
            self._eager_left[bucket] -= 1
            return self._eagerly(batch, given)
        try:
            step = self._steps[bucket] = self._recorded(batch, given)
        except CannotRecordError as error:
            logger.info("steps are not recorded: %s", error)
            self._is_off = True
            return self._eagerly(batch, given)
        self.num_recorded += 1
        return _handed_on(step.result)

    def _eagerly(self, batch: ForwardBatch, given: StageOutput) -> StageOutput:
        return self._model.forward(batch, given.hidden, self._context, given.aux_hidden)

    def _recorded(self, batch: ForwardBatch, given: StageOutput) -> RecordedStep:
        """Run the batch, with tables for up to twice as many pages of a row."""
        own = replace(
            batch, plan_mark=None, states=(), positions=batch.positions.clone(),
            token_ids=None if batch.token_ids is None else batch.token_ids.clone(),
            page_tables=with_room(batch.page_tables))
        given = _handed_on(given)
        self._attention.plan(own)
        states, results = self._states.plan(own), list[StageOutput]()
        own.context_lens = _Withheld()

        def forward() -> None:
            results.append(self._model.forward(own, given.hidden, self._context, given.aux_hidden))

        recording = record(forward, self._arena)
        return RecordedStep(own, states, given, results[0], recording)


def _handed_on(output: StageOutput) -> StageOutput:
    """With copies of what is sent while the next step may run."""
    return replace(output, hidden=None if output.hidden is None else output.hidden.clone(),
                   aux_hidden={layer_id: hidden.clone() for layer_id, hidden in output.aux_hidden.items()})


def _refill_step(step: RecordedStep, batch: ForwardBatch, states: object, given: StageOutput) -> None:
    """Raises OtherShapeError."""
    for kept, new in ((step.batch.token_ids, batch.token_ids), (step.batch.positions, batch.positions),
                      (step.given.hidden, given.hidden), (step.given.aux_hidden, given.aux_hidden),
                      (step.states, states),
                      (step.batch.forward_metadata_plan, batch.forward_metadata_plan)):
        refill(kept, new)


def with_room(page_tables: Tensor) -> Tensor:
    """page_tables: [R, P]. A copy for up to twice as many pages of a row, the further ones the null page."""
    width = page_tables.shape[1]
    return F.pad(page_tables, (0, (1 << width.bit_length()) - width), value=NULL_INDEX)


def refill(kept: object, new: object) -> None:
    """Give kept tensors, alone or in dataclasses and dictionaries, the values of new ones, of which tables may be
    narrower; everything else must be the same.

    Raises:
        OtherShapeError: it is not. What came before it is filled.
    """
    if isinstance(kept, Tensor):
        if not isinstance(new, Tensor) or not _are_alike(kept, new):
            raise OtherShapeError(f"it was recorded with {_described(kept)}, and is given {_described(new)}")
        (kept if kept.shape == new.shape else kept[:, :new.shape[1]]).copy_(new)
    elif type(kept) is type(new) and is_dataclass(kept):
        for name in kept.__dataclass_fields__:
            refill(getattr(kept, name), getattr(new, name))
    elif isinstance(kept, dict) and isinstance(new, dict) and kept.keys() == new.keys():
        for name, value in kept.items():
            refill(value, new[name])
    elif kept != new:
        raise OtherShapeError(f"it was recorded with {_described(kept)}, and is given {_described(new)}")


def _are_alike(kept: Tensor, new: Tensor) -> bool:
    """Of one type and shape, or tables of as many rows, the new one not wider."""
    is_table = kept.dtype is torch.int32 and kept.dim() == new.dim() == 2
    return kept.dtype is new.dtype and (
        kept.shape == new.shape or (is_table and len(kept) == len(new) and kept.shape[1] > new.shape[1]))


def _described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
