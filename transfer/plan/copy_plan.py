"""Copy plan of a handoff: the items that each source stage sends to each destination stage.

The plan is pure: both sides derive the same one.

A *lane* contains the items that one source stage sends to one destination stage: the records of the
layers that both own. If stages have different numbers of ranks, these are the parts of the records
that both have (`engine.memory.layout.stretches`), each item of a single record. A "stage" here is
one process of a pool: each rank of a stage counts as one. Pages that are adjacent on both sides
travel as one item, if one chunk computes them all and they stay under `MAX_RUN_BYTES`. Message tags
are numbered per destination stage: the items of its lanes in order of source stage, each lane
followed by its trailer. Lanes without items have no trailer. Tags begin at a random number of 64
bits and wrap within its low 24 bits, so that a foreign process cannot guess them.

The destination makes its terms from the source's (`plan_destination`); the source checks that it
derives the same plan (`check_plan`). `item_seals.py` proves that the received bytes are the sent
ones.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from engine.memory.layout import CacheKind, CacheSpec, Stretch, stretches, travelling
from runtime.errors import IncompatiblePeerError
from transfer.plan.compatibility import SCHEMA_VERSION
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms, StageEndpoint
from transfer.plan.term_checks import check_held, check_layers, check_pages, check_slots
from transfer.transport.protocol import TAG_OFFSET_BITS

MAX_RUN_BYTES = 1 << 20
"""Upper limit of one item, unless a single record is larger.

It is part of the plan: a change needs a new SCHEMA_VERSION.
"""
_OFFSETS = (1 << TAG_OFFSET_BITS) - 1


class Item(NamedTuple):
    """Consecutive records of one layer and kind, the unit of sending, checking and naming."""

    layer_id: int
    kind: CacheKind
    source_index: int  # first page or slot at the source
    dest_index: int  # first page or slot at the destination
    num_records: int
    num_bytes: int
    ready_tokens: int  # number of prompt tokens that must pass the layer before it may be sent
    stretch: Stretch | None = None  # part of a single record; None for whole records

    @property
    def name(self) -> str:
        """Return the name for errors, by the destination's index: "layer 3 kv pages 17-20"."""
        unit = "page" if self.kind.is_paged else "slot"
        if self.num_records == 1:
            part = "" if self.stretch is None else f" from byte {self.stretch.dest_start}"
            return f"layer {self.layer_id} {self.kind} {unit} {self.dest_index}{part}"
        return f"layer {self.layer_id} {self.kind} {unit}s {self.dest_index}-{self.dest_index + self.num_records - 1}"

    @property
    def source_part(self) -> slice | None:
        """Return the bytes of the source's record to send, or None for all."""
        return (
            None
            if self.stretch is None
            else slice(self.stretch.source_start, self.stretch.source_start + self.num_bytes)
        )

    @property
    def dest_part(self) -> slice | None:
        """Return the bytes of the destination's record to fill, or None for all."""
        return (
            None
            if self.stretch is None
            else slice(self.stretch.dest_start, self.stretch.dest_start + self.num_bytes)
        )


@dataclass(frozen=True)
class Lane:
    """Items of one pair of stages.

    Item 0 has the tag `offset` after `tag_base`; the trailer's tag follows that of the last item.
    """

    source_stage: int
    dest_stage: int
    tag_base: int
    offset: int
    items: tuple[Item, ...]

    def tag(self, index: int) -> int:
        """Return the tag of an item, or of the trailer. All tags have the prefix of the base."""
        return self.tag_base & ~_OFFSETS | self.tag_base + self.offset + index & _OFFSETS

    @property
    def trailer_tag(self) -> int:
        return self.tag(len(self.items))


class _RecordRun(NamedTuple):
    source_index: int
    dest_index: int
    num_records: int
    ready_tokens: int


_LanePart = tuple[CacheSpec, tuple[Stretch, ...] | None]


class CopyPlan:
    """All lanes of one handoff, each derived on request."""

    def __init__(
        self, source: SourceTerms, destination: DestinationTerms, specs: Sequence[CacheSpec]
    ) -> None:
        """Check both sides and derive the plan.

        `specs` covers the whole model; the plan covers those that are handed over (see
        `travelling`).

        Raises:
            IncompatiblePeerError: page lists or layer ranges of the two sides do not match each
                other or the model.
        """
        specs = sorted(
            (
                spec
                for spec in travelling(specs, with_draft=destination.with_draft)
                if spec.kind.is_kept or not source.is_loan
            ),
            key=lambda spec: (spec.layer_id, spec.kind),
        )
        check_pages(source, destination)
        check_held(source, destination)
        check_slots(source, destination, specs)
        check_layers("source", source.stages, specs)
        check_layers("destination", destination.stages, specs)
        self._source = source
        self._destination = destination
        self._specs = tuple(specs)
        self._runs: dict[int, tuple[_RecordRun, ...]] = {}

    def lanes_to(self, dest_stage: int) -> tuple[Lane, ...]:
        """Return the lanes that this destination stage receives."""
        lanes = (self._lane(stage, dest_stage) for stage in range(len(self._source.stages)))
        return tuple(lane for lane in lanes if lane.items)

    def lanes_from(self, source_stage: int) -> tuple[Lane, ...]:
        """Return the lanes that this source stage sends."""
        lanes = (self._lane(source_stage, stage) for stage in range(len(self._destination.stages)))
        return tuple(lane for lane in lanes if lane.items)

    @cached_property
    def digest(self) -> str:
        """Return a digest of all inputs of the plan and of the page runs."""
        source = self._source
        destination = self._destination
        parts: list[object] = [
            SCHEMA_VERSION,
            destination.session_id,
            destination.epoch,
            destination.tag_base,
            source.compatibility,
            source.content,
            source.num_tokens,
            source.page_size,
            source.chunk_tokens,
            source.slot_id,
            destination.slot_id,
            [
                (str(stage.layers), stage.tensor.rank, stage.tensor.size, stage.incarnation)
                for stage in (*source.stages, *destination.stages)
            ],
            [(spec.layer_id, str(spec.kind), spec.record_bytes) for spec in self._specs],
            [
                tuple(run)
                for size in sorted(
                    {spec.record_bytes for spec in self._specs if spec.kind.is_paged}
                )
                for run in self._page_runs(size)
            ],
        ]
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def _lane(self, source_stage: int, dest_stage: int) -> Lane:
        offset = 0
        for stage in range(source_stage):
            count = sum(self._num_items(*part) for part in self._lane_parts(stage, dest_stage))
            offset += count + (count > 0)
        items = tuple(
            item
            for part in self._lane_parts(source_stage, dest_stage)
            for item in self._items(*part)
        )
        if offset + len(items) >= 1 << TAG_OFFSET_BITS:
            raise IncompatiblePeerError(
                f"a handoff of {offset + len(items)} items to one stage; "
                f"the limit is {(1 << TAG_OFFSET_BITS) - 1}"
            )
        return Lane(source_stage, dest_stage, self._destination.tag_base, offset, items)

    def _lane_parts(self, source_stage: int, dest_stage: int) -> list[_LanePart]:
        """Return the source's records in the lane, with the stretches to send (None: all)."""
        source = self._source.stages[source_stage]
        dest = self._destination.stages[dest_stage]
        layers = source.layers.intersect(dest.layers)
        parts = (
            (spec, stretches(spec, source.tensor, dest.tensor))
            for spec in self._specs
            if spec.layer_id in layers
        )
        return [
            (spec.of_rank(source.tensor), moved) for spec, moved in parts if moved is None or moved
        ]

    def _num_items(self, spec: CacheSpec, moved: tuple[Stretch, ...] | None) -> int:
        return len(self._runs_of(spec, moved)) * (1 if moved is None else len(moved))

    def _items(self, spec: CacheSpec, moved: tuple[Stretch, ...] | None) -> list[Item]:
        if moved is None:
            return [
                Item(
                    spec.layer_id,
                    spec.kind,
                    run.source_index,
                    run.dest_index,
                    run.num_records,
                    run.num_records * spec.record_bytes,
                    run.ready_tokens,
                )
                for run in self._runs_of(spec, moved)
            ]
        return [
            Item(
                spec.layer_id,
                spec.kind,
                run.source_index,
                run.dest_index,
                1,
                stretch.num_bytes,
                run.ready_tokens,
                stretch,
            )
            for run in self._runs_of(spec, moved)
            for stretch in moved
        ]

    def _runs_of(
        self, spec: CacheSpec, moved: tuple[Stretch, ...] | None
    ) -> tuple[_RecordRun, ...]:
        """Return the slot, or the runs of pages; runs have one page if parts of pages are sent."""
        if not spec.kind.is_paged:
            return (
                _RecordRun(
                    self._source.slot_id, self._destination.slot_id, 1, self._source.num_tokens
                ),
            )
        return self._page_runs(spec.record_bytes if moved is None else MAX_RUN_BYTES)

    def _page_runs(self, record_bytes: int) -> tuple[_RecordRun, ...]:
        """Return the page runs for records of this size, cached because most models have one size."""
        if record_bytes not in self._runs:
            max_pages = max(1, MAX_RUN_BYTES // record_bytes)
            self._runs[record_bytes] = tuple(_page_runs(self._source, self._destination, max_pages))
        return self._runs[record_bytes]


def plan_lane(
    source: SourceTerms,
    destination: DestinationTerms,
    specs: Sequence[CacheSpec],
    source_stage: int,
    dest_stage: int,
) -> tuple[Item, ...]:
    """Return the items of one lane, none if the two stages share no layer.

    Raises IncompatiblePeerError.
    """
    lanes = CopyPlan(source, destination, specs).lanes_from(source_stage)
    return next((lane.items for lane in lanes if lane.dest_stage == dest_stage), ())


def _page_runs(
    source: SourceTerms, destination: DestinationTerms, max_pages: int
) -> list[_RecordRun]:
    """Return the runs of the pages that the destination has not cached."""
    runs: list[_RecordRun] = []
    run_chunks = (-1, -1)
    pages = list(enumerate(zip(source.page_ids, destination.page_ids, strict=True)))
    for i, (source_page, dest_page) in pages[destination.held_tokens // source.page_size :]:
        end_token = min((i + 1) * source.page_size, source.num_tokens)
        # The chunks of a page's first and last token: pages of different chunks are never one item.
        chunks = (
            i * source.page_size // source.chunk_tokens,
            (end_token - 1) // source.chunk_tokens,
        )
        last = runs[-1] if runs else None
        if (
            last is not None
            and chunks == run_chunks
            and last.num_records < max_pages
            and source_page == last.source_index + last.num_records
            and dest_page == last.dest_index + last.num_records
        ):
            runs[-1] = _RecordRun(
                last.source_index, last.dest_index, last.num_records + 1, end_token
            )
        else:
            runs.append(_RecordRun(source_page, dest_page, 1, end_token))
            run_chunks = chunks
    return runs


def plan_destination(
    source: SourceTerms,
    *,
    session_id: str,
    epoch: int,
    tag_base: int,
    key: bytes,
    page_ids: Sequence[int],
    slot_id: int,
    stages: Sequence[StageEndpoint],
    specs: Sequence[CacheSpec],
    with_draft: bool = False,
    held_tokens: int = 0,
) -> DestinationTerms:
    """Return the destination terms for `source`.

    `tag_base` (64 bits) and `key` are random and new for each epoch. `page_ids` are the pages of
    the prompt only (growth is not handed over), including those of the first `held_tokens` tokens.
    `specs` covers the whole model.

    Raises:
        IncompatiblePeerError: the two sides do not match.
    """
    destination = DestinationTerms(
        session_id,
        epoch,
        tag_base,
        tuple(page_ids),
        slot_id,
        tuple(stages),
        plan_digest="",
        key=key,
        with_draft=with_draft,
        held_tokens=held_tokens,
    )
    return replace(destination, plan_digest=CopyPlan(source, destination, specs).digest)


def check_plan(
    source: SourceTerms, destination: DestinationTerms, specs: Sequence[CacheSpec]
) -> CopyPlan:
    """Return the plan that both sides have agreed on.

    Raises:
        IncompatiblePeerError: this side derives another plan than that of the destination terms.
    """
    plan = CopyPlan(source, destination, specs)
    if plan.digest != destination.plan_digest:
        raise IncompatiblePeerError(
            f"session {destination.session_id}: this side derives copy plan {plan.digest}, "
            f"the destination terms were made for {destination.plan_digest or 'none'}"
        )
    return plan
