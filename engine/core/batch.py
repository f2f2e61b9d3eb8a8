"""The batch of one forward, and the mark of what was planned for it.

A `ForwardBatch` is complete when built. Its rows are requests; its tokens are the rows' new tokens,
concatenated in row order. Planning attention records the metadata *on the batch*
(`mark_forward_metadata_ready`). A forward path may check nothing but `needs_forward_metadata_init`.
Operations that change membership (`filter`, `split`) return a batch without the mark.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.core.draft_trees import CarriedKeys, SpecInfo
from engine.core.request import SamplingParams
from engine.core.state_rows import StateRow
from runtime.grammar import Grammar


class ForwardMode(StrEnum):
    """The kind of tokens in the rows of a batch."""

    PREFILL = "prefill"  # prompt tokens, causal; any number per row
    DECODE = "decode"  # one token per row
    REPLAY = "replay"  # known output tokens, any number per row, with the bits of decoding them
    VERIFY = "verify"  # a draft tree per row
    DRAFT = "draft"  # the draft model's own steps
    IDLE = "idle"  # no tokens; keeps collectives and pipelines in step
    PREBUILT = "prebuilt"  # handed-over prompts that join without a forward


class FieldRule(StrEnum):
    """The effect of a membership change on a field.

    Every field of the batch declares one.
    """

    CARRIED = "carried"  # the same in parent and child
    RECOMPUTED = "recomputed"  # selected or rebuilt from the remaining rows
    DROPPED = "dropped"  # empty in the child


_CARRIED = {"rule": FieldRule.CARRIED}
_RECOMPUTED = {"rule": FieldRule.RECOMPUTED}
_DROPPED = {"rule": FieldRule.DROPPED}


@dataclass(frozen=True)
class OutputOpening:
    """The state of a request that the last stage needs before the first token.

    `prompt_token_ids` is set only if penalties count them.
    """

    prompt_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True)
class OutputRow:
    """The output so far of a row whose penalties or grammar depend on it.

    It is a change to the last stage's copy: the first `kept` tokens remain, and `token_ids` follow
    them. The last stage stores the copy under `key` until a batch lists the key in `ended_keys`.
    The first row of a request carries an `opening`, which replaces any earlier copy under the key.
    `is_only` means that no other row will follow.
    """

    key: int
    kept: int
    token_ids: tuple[int, ...]
    opening: OutputOpening | None = None
    is_only: bool = False


@dataclass(frozen=True)
class SamplingRow:
    """The inputs for sampling one row's next token, except the output that the last stage keeps.

    Attributes:
        position: the absolute position of the token to sample. With the seed it keys the random
            number.
        banned_token_ids: tokens that cannot be sampled (stop tokens before min_tokens).
        banned_before: the position from which they are allowed again; it matters to nodes of a
            draft tree.
        output: set for rows whose penalties or grammar need it.
    """

    params: SamplingParams
    position: int
    num_top_logprobs: int | None = None
    banned_token_ids: tuple[int, ...] = ()
    banned_before: int = 0
    output: OutputRow | None = None


@dataclass(frozen=True)
class ScoringRow:
    """Known tokens of one row to score.

    The logits of token i score `next_token_ids[i]`, the token after it.
    """

    next_token_ids: tuple[int, ...]
    num_top: int  # number of most likely alternatives to report with each


@dataclass(frozen=True)
class GraphBucket:
    """A batch shape with a captured forward.

    It serves batches of `mode` with at most `max_rows` rows of at most `row_tokens` tokens, padded
    to that size.

    Attributes:
        is_masked: the rows may be trees, which attention reads through a mask; otherwise they are
            causal.
        samples: a token is sampled after the rows. Most prompt chunks sample none.
        adapters: those of the rows, as in `ForwardBatch`; only recordings on the host have any.
    """

    mode: ForwardMode
    max_rows: int
    row_tokens: int = 1
    is_masked: bool = False
    samples: bool = True
    adapters: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Return the number of rows of a padded batch.

        If rows may be short, one extra row takes the remaining tokens.
        """
        return self.max_rows + (self.row_tokens > 1)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of a padded batch."""
        return self.max_rows * self.row_tokens

    def __str__(self) -> str:
        return f"{self.mode} of {self.max_rows} x {self.row_tokens} tokens{' in trees' * self.is_masked}"


AdapterRun = tuple[str, int]  # the name of an adapter, or "", and a number of adjacent tokens


class DataShare(NamedTuple):
    """One data rank's share of a step of the ranks that share a stage."""

    tokens: int  # tokens of its forward
    logits: int  # tokens whose logits are computed
    # The adapters of those tokens, and of those with logits; empty if none has one.
    adapters: tuple[AdapterRun, ...] = ()
    logit_adapters: tuple[AdapterRun, ...] = ()


class BatchPlanner(Protocol):
    """A planner of attention that marks the batches it plans."""

    def plan(self, batch: "ForwardBatch", *, replan_equivalent: bool = False) -> None: ...


@dataclass(frozen=True)
class PlanMark:
    """The record of what was planned for a batch.

    `plan` is the planner's own frozen object, opaque here. `replan_equivalent` declares that
    planning again after padding gives an equally valid plan.
    """

    planner: object
    plan: object | None
    num_rows: int
    num_tokens: int  # number of input ids; 0 without any
    replan_equivalent: bool = False


@dataclass
class ForwardBatch:
    """Rows of requests with their new tokens.

    R is the number of rows, T of tokens, P of pages of the longest row. All tensors are contiguous,
    on the CPU or on the stage's device. Lengths are Python ints, because planning happens on the
    host.

    Attributes:
        request_keys: one key per row, stable over the request's life on this pool.
        query_lens: the number of new tokens per row; sums to T.
        context_lens: the number of tokens per row that were cached before this batch.
        token_ids: [T] int64, or None on stages that receive hidden states.
        positions: [T] int64 absolute positions: context_len + offset, or by depth for trees.
        page_tables: [R, P] int32 page ids in position order, padded with the null page 0.
        slot_ids: [R] int32 state slots; 0 (the null slot) for models without recurrent state.
        sampling: per row, or None if no token is sampled because this chunk does not finish the
            prompt.
        scoring: per row, or None if no token is scored; empty if no row scores.
        states: per row the prefix cache's operations on recurrent state; empty if there are none.
        adapters: per row the name of its adapter or ""; empty if no row has one.
        ended_keys: requests whose output the last stage may drop. It may have dropped some already.
        spec_info: `SpecInfo` on a speculating pool; `CarriedKeys` on a draft whose steps share
            keys.
        graph_bucket: set if the rows are padded to a captured shape. Planning then refreshes the
            buffers of that capture.
        plan_mark: the record of planning; None before. Set by `mark_forward_metadata_ready` only.
        shares: the shares of all data ranks in the step, including this one; set when the step is
            planned.
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
    adapters: tuple[str, ...] = field(default=(), metadata=_RECOMPUTED)
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
        """Return the idle batch with which a PREBUILT batch joins the forward of other data ranks.

        Return None if no rank has a forward. A PREBUILT batch has no forward of its own.
        """
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

        `plan` is the planner's own frozen object; a mark without one keeps the earlier plan. A
        forward may plan again only with `replan_equivalent`. No caller in the product sets it yet:
        all plan unpadded batches, or padded ones before the replay. Without input ids the recorded
        number of tokens is 0.
        """
        kept = self.forward_metadata_plan if plan is None else plan
        self.plan_mark = PlanMark(
            planner, kept, self.num_rows, self._num_input_ids(), replan_equivalent
        )

    def needs_forward_metadata_init(self) -> bool:
        """Return whether a forward must plan first.

        no mark                                                     yes
        marked, with any shapes                                     no
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
        """Return a batch of these rows, in this order, without a mark."""
        starts = [0]
        for length in self.query_lens:
            starts.append(starts[-1] + length)
        tokens = [i for row in rows for i in range(starts[row], starts[row + 1])]
        token_index = torch.tensor(tokens, dtype=torch.long)
        row_index = torch.tensor(rows, dtype=torch.long)
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
            adapters=tuple(self.adapters[row] for row in rows) if self.adapters else (),
            ended_keys=self.ended_keys,
        )

    def split(self, at: int) -> tuple["ForwardBatch", "ForwardBatch"]:
        """Return the rows before `at` and the remaining rows, both without a mark."""
        return self.filter(list(range(at))), self.filter(list(range(at, self.num_rows)))

    def _num_input_ids(self) -> int:
        return 0 if self.token_ids is None else self.token_ids.shape[0]


def idle_batch(shares: tuple[DataShare, ...] = ()) -> ForwardBatch:
    """Return a batch without rows.

    A data rank without requests runs it to take part in layers that all data ranks divide.
    """
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
    """Plan a batch unless its mark shows a plan; return whether it planned.

    Stages and drafters call it before eager forwards and before steps recorded on the host.
    Captured forwards, recorded drafts and the copies that recordings are made with do not. Each of
    them calls `plan` of its planner on a batch that it has just built, without a mark. Recorded
    drafts plan that way also for steps that they run eagerly.
    """
    if not batch.needs_forward_metadata_init():
        return False
    planner.plan(batch)
    return True
