"""The unit of one forward, and the marker of what was planned for it.

A `ForwardBatch` is complete when built. Its rows are requests; its tokens are the rows' new tokens,
one row after the other. Attention metadata planned for it is recorded *on it*
(`mark_forward_metadata_ready`), and `needs_forward_metadata_init` is all that a forward path may
check. Whatever changes membership (`filter`, `split`, `merge`, `clone`) gives a batch without the
marker.
"""

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.core.draft_trees import CarriedKeys, SpecInfo
from engine.core.request import SamplingParams
from engine.core.state_rows import NO_STATES, StateRow
from runtime.grammar import Grammar


class ForwardMode(StrEnum):
    """What the rows of a batch bring."""

    PREFILL = "prefill"  # prompt tokens, causal; a row may bring any number
    DECODE = "decode"  # one token per row
    VERIFY = "verify"  # a draft tree per row
    DRAFT = "draft"  # the draft model's own steps
    IDLE = "idle"  # no tokens; keeps collectives and pipelines in step
    PREBUILT = "prebuilt"  # handed-over prompts joining without a forward


class FieldRule(StrEnum):
    """What an operation that changes membership does with a field. Every field of the batch
    declares one."""

    CARRIED = "carried"  # the same for parent and child
    RECOMPUTED = "recomputed"  # selected or rebuilt from the rows that stay
    DROPPED = "dropped"  # starts empty in the child


_CARRIED = {"rule": FieldRule.CARRIED}
_RECOMPUTED = {"rule": FieldRule.RECOMPUTED}
_DROPPED = {"rule": FieldRule.DROPPED}


@dataclass(frozen=True)
class OutputOpening:
    """What the last stage has to know of a request to begin with. `prompt_token_ids` where
    penalties count them."""

    prompt_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True)
class OutputRow:
    """The output so far of a row whose penalties or grammar depend on it, as a change to what the
    last stage keeps of the request: its first `kept` tokens stand, and `token_ids` follow them.

    The last stage keeps it under `key` until a batch names that in `ended_keys`. An `opening` comes
    with the first row of a request; whatever was kept under its key before is void. `is_only`: no
    other row will follow.
    """

    key: int
    kept: int
    token_ids: tuple[int, ...]
    opening: OutputOpening | None = None
    is_only: bool = False


@dataclass(frozen=True)
class SamplingRow:
    """What the last stage needs to draw one row's next token, beyond the output that it keeps.

    `output` is given for rows whose penalties or grammar need it. `banned_token_ids` cannot be
    drawn (stop tokens before min_tokens); from position `banned_before` on they may, which matters
    to the nodes of a draft tree.
    """

    params: SamplingParams
    position: (
        int  # absolute position of the token to be drawn; with the seed it keys the random number
    )
    num_top_logprobs: int | None = None
    banned_token_ids: tuple[int, ...] = ()
    banned_before: int = 0
    output: OutputRow | None = None


@dataclass(frozen=True)
class ScoringRow:
    """Known tokens of one row to be scored: token i of the row against `next_token_ids[i]`, which
    follows it."""

    next_token_ids: tuple[int, ...]
    num_top: int  # most likely alternatives to report with each


@dataclass(frozen=True)
class GraphBucket:
    """A shape that forwards are captured for: batches of `mode`, of up to `max_rows` rows of up to
    `row_tokens` tokens, padded to that. `is_masked`: the rows may be trees, which attention sees
    through a mask; else each row is causal. `draws`: a token is drawn behind them; behind most
    chunks of a prompt none is."""

    mode: ForwardMode
    max_rows: int
    row_tokens: int = 1
    is_masked: bool = False
    draws: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of a padded batch. Where rows may be short, one more takes what they leave."""
        return self.max_rows + (self.row_tokens > 1)

    @property
    def num_tokens(self) -> int:
        """Tokens of a padded batch."""
        return self.max_rows * self.row_tokens

    def __str__(self) -> str:
        return f"{self.mode} of {self.max_rows} x {self.row_tokens} tokens{' in trees' * self.is_masked}"


class DataShare(NamedTuple):
    """What one data rank brings into a step of the ranks that share a stage."""

    tokens: int  # of its forward
    logits: int  # of these, those whose logits are computed


class BatchPlanner(Protocol):
    """Plans the attention of batches and marks them."""

    def plan(self, batch: "ForwardBatch", *, replan_equivalent: bool = False) -> None: ...


@dataclass(frozen=True)
class PlanMark:
    """What was planned for a batch: by which planner, for which shapes, and the planner's own
    frozen object, opaque here.

    `replan_equivalent` declares that planning again after padding gives an equally valid plan.
    """

    planner: object
    plan: object | None
    num_rows: int
    num_tokens: int  # input ids; 0 without any
    replan_equivalent: bool = False


@dataclass
class ForwardBatch:
    """Rows of requests with their new tokens.

    Legend: R rows, T tokens, P pages of the longest row. All tensors are on the CPU or on the
    stage's device, contiguous; lengths are Python ints, because planning happens on the host.

    request_keys       one key per row, stable over the request's life on this pool
    query_lens         new tokens per row; sums to T
    context_lens       tokens already in the cache per row, before this batch
    token_ids          [T] int64, or None on stages that get hidden states
    positions          [T] int64 absolute positions (context_len + offset; by depth for trees)
    page_tables        [R, P] int32 page ids in position order, padded with the null page 0
    slot_ids           [R] int32 state slots, 0 (the null slot) for models without recurrent state
    sampling           per row, or None where no token is to be drawn (prompt not finished by this chunk)
    scoring            per row, or None where no token is to be scored; empty where no row scores
    states             per row what a prefix cache does with its recurrent state; empty where it does nothing
    ended_keys         requests whose output the last stage may drop; also ones it has dropped already
    spec_info          `SpecInfo` on a pool that speculates, `CarriedKeys` on a draft whose steps share keys
    graph_bucket       set where the rows are padded to a captured shape: planning then refreshes that capture's buffers
    plan_mark          what was planned for it, None before; set by `mark_forward_metadata_ready` alone
    shares             of every data rank in its step, this batch's own among them; set where the step is planned
    """

    mode: ForwardMode = field(metadata=_CARRIED)
    request_keys: tuple[int, ...] = field(metadata=_RECOMPUTED)
    query_lens: tuple[int, ...] = field(metadata=_RECOMPUTED)
    context_lens: tuple[int, ...] = field(metadata=_RECOMPUTED)
    token_ids: Tensor | None = field(metadata=_RECOMPUTED)
    positions: Tensor = field(metadata=_RECOMPUTED)
    page_tables: Tensor = field(metadata=_RECOMPUTED)
    slot_ids: Tensor = field(metadata=_RECOMPUTED)
    sampling: tuple[SamplingRow | None, ...] = field(metadata=_RECOMPUTED)
    scoring: tuple[ScoringRow | None, ...] = field(default=(), metadata=_RECOMPUTED)
    states: tuple[StateRow, ...] = field(default=(), metadata=_RECOMPUTED)
    ended_keys: tuple[int, ...] = field(default=(), metadata=_CARRIED)
    spec_info: SpecInfo | CarriedKeys | None = field(default=None, metadata=_DROPPED)
    graph_bucket: GraphBucket | None = field(default=None, metadata=_DROPPED)
    plan_mark: PlanMark | None = field(default=None, metadata=_DROPPED)
    shares: tuple[DataShare, ...] = field(default=(), metadata=_DROPPED)

    @property
    def num_rows(self) -> int:
        return len(self.request_keys)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def inner_idle(self) -> "ForwardBatch | None":
        """What a PREBUILT batch, which has no forward of its own, takes part in that of other data
        ranks with; None where no rank has any."""
        if self.mode is not ForwardMode.PREBUILT or not any(share.tokens for share in self.shares):
            return None
        return idle_batch(self.shares)

    @property
    def forward_metadata_ready(self) -> bool:
        return self.plan_mark is not None

    @property
    def forward_metadata_planned_bs(self) -> int | None:
        return None if self.plan_mark is None else self.plan_mark.num_rows

    @property
    def forward_metadata_planned_num_tokens(self) -> int | None:
        return None if self.plan_mark is None else self.plan_mark.num_tokens

    @property
    def forward_metadata_replan_equivalent(self) -> bool:
        return self.plan_mark is not None and self.plan_mark.replan_equivalent

    @property
    def forward_metadata_planner(self) -> object | None:
        return None if self.plan_mark is None else self.plan_mark.planner

    @property
    def forward_metadata_plan(self) -> object | None:
        return None if self.plan_mark is None else self.plan_mark.plan

    def mark_forward_metadata_ready(
        self, planner: object, *, plan: object | None = None, replan_equivalent: bool = False
    ) -> None:
        """Record that `planner` planned this batch with its present shapes.

        `plan` is the planner's own frozen object; a mark without one keeps what was planned before.
        Only with `replan_equivalent` may a forward plan again (no caller in the product declares
        that yet: all plan unpadded batches, or padded ones before the replay). Without input ids
        the recorded token count is 0.
        """
        kept = self.forward_metadata_plan if plan is None else plan
        self.plan_mark = PlanMark(
            planner, kept, self.num_rows, self._num_input_ids(), replan_equivalent
        )

    def needs_forward_metadata_init(self) -> bool:
        """Whether a forward must plan first:

        no mark                                                     yes
        marked, whatever its shapes are now                         no
        marked as replan_equivalent, rows or tokens changed since   yes
        """
        mark = self.plan_mark
        if mark is None:
            return True
        return mark.replan_equivalent and (self.num_rows, self._num_input_ids()) != (
            mark.num_rows,
            mark.num_tokens,
        )

    def filter(self, rows: list[int]) -> "ForwardBatch":
        """The batch of these rows, in this order, without a marker."""
        starts = [0]
        for length in self.query_lens:
            starts.append(starts[-1] + length)
        tokens = [i for row in rows for i in range(starts[row], starts[row + 1])]
        token_index, row_index = (
            torch.tensor(tokens, dtype=torch.long),
            torch.tensor(rows, dtype=torch.long),
        )
        return ForwardBatch(
            mode=self.mode,
            request_keys=tuple(self.request_keys[row] for row in rows),
            query_lens=tuple(self.query_lens[row] for row in rows),
            context_lens=tuple(self.context_lens[row] for row in rows),
            token_ids=None if self.token_ids is None else self.token_ids[token_index],
            positions=self.positions[token_index],
            page_tables=self.page_tables[row_index],
            slot_ids=self.slot_ids[row_index],
            sampling=tuple(self.sampling[row] for row in rows),
            scoring=tuple(self.scoring[row] for row in rows) if self.scoring else (),
            states=tuple(self.states[row] for row in rows) if self.states else (),
            ended_keys=self.ended_keys,
        )

    def split(self, at: int) -> tuple["ForwardBatch", "ForwardBatch"]:
        """Rows before `at`, and the rest; neither has a marker."""
        return self.filter(list(range(at))), self.filter(list(range(at, self.num_rows)))

    def clone(self) -> "ForwardBatch":
        """The same rows without a marker.

        Waits for its caller: a batch that runs once more, on another backend. Tests and benchmarks
        do that today.
        """
        dropped: dict[str, Any] = {
            f.name: f.default for f in fields(self) if f.metadata["rule"] is FieldRule.DROPPED
        }
        return replace(self, **dropped)

    def _num_input_ids(self) -> int:
        return 0 if self.token_ids is None else self.token_ids.shape[0]


def idle_batch(shares: tuple[DataShare, ...] = ()) -> ForwardBatch:
    """No rows: what a data rank runs that has nothing of its own where another one needs it for the
    layers that all divide."""
    return ForwardBatch(
        ForwardMode.IDLE,
        (),
        (),
        (),
        token_ids=torch.empty(0, dtype=torch.int64),
        positions=torch.empty(0, dtype=torch.int64),
        page_tables=torch.zeros(0, 1, dtype=torch.int32),
        slot_ids=torch.empty(0, dtype=torch.int32),
        sampling=(),
        shares=shares,
    )


def plan_where_needed(batch: ForwardBatch, planner: BatchPlanner) -> bool:
    """Plan what a forward is about to run on, unless the batch is marked as planned. Returns
    whether it planned.

    Every forward that is not a replay calls it: the target's, and each of a draft.
    """
    if not batch.needs_forward_metadata_init():
        return False
    planner.plan(batch)
    return True


def merge(first: ForwardBatch, second: ForwardBatch) -> ForwardBatch:
    """The rows of both, without a marker. Both must have the same mode and agree on whether they
    carry token ids.

    Waits for its caller: a running batch that is kept and gets new rows. Today schedulers build
    each batch anew.
    """
    if first.mode is not second.mode:
        raise ValueError(f"cannot merge a {first.mode} batch with a {second.mode} batch")
    if (first.token_ids is None) != (second.token_ids is None):
        raise ValueError("cannot merge a batch that carries token ids with one that carries none")
    width = max(first.page_tables.shape[1], second.page_tables.shape[1])
    tables = [
        torch.nn.functional.pad(b.page_tables, (0, width - b.page_tables.shape[1]))
        for b in (first, second)
    ]
    ids = None
    if first.token_ids is not None and second.token_ids is not None:
        ids = torch.cat([first.token_ids, second.token_ids])
    return ForwardBatch(
        mode=first.mode,
        request_keys=first.request_keys + second.request_keys,
        query_lens=first.query_lens + second.query_lens,
        context_lens=first.context_lens + second.context_lens,
        token_ids=ids,
        positions=torch.cat([first.positions, second.positions]),
        page_tables=torch.cat(tables),
        slot_ids=torch.cat([first.slot_ids, second.slot_ids]),
        sampling=first.sampling + second.sampling,
        scoring=_all_scoring(first) + _all_scoring(second)
        if first.scoring or second.scoring
        else (),
        states=_all_states(first) + _all_states(second) if first.states or second.states else (),
        ended_keys=tuple(dict.fromkeys(first.ended_keys + second.ended_keys)),
    )


def _all_scoring(batch: ForwardBatch) -> tuple[ScoringRow | None, ...]:
    return batch.scoring or (None,) * batch.num_rows


def _all_states(batch: ForwardBatch) -> tuple[StateRow, ...]:
    return batch.states or (NO_STATES,) * batch.num_rows
