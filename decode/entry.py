"""A request on a decode pool: the events of its stream and its scheduling state.

Belongs to the engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from decode.draft_yields import GrownTree
from decode.speculation import DraftState
from decode.suffix_draft import SuffixDraft
from engine.core.batch import ForwardMode
from engine.core.draft_trees import AcceptedNodes
from engine.core.request import FinishReason, SampledToken
from engine.memory.layout import NULL_INDEX
from engine.memory.leases import SlotAllocator, SlotLease
from engine.speculative.contracts.config import Proposer
from pool.request.entry import Entry, Failed
from runtime.digests import names_draft
from runtime.errors import BatonError

DECODING = (ForwardMode.DECODE, ForwardMode.VERIFY)
MAX_REPLAYED = 64  # tokens of a request in a step; other requests wait meanwhile


@dataclass(frozen=True)
class Generated:
    """The event with the request's next tokens: one, or several if draft tokens were accepted."""

    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True)
class Finished:
    """The event that the request has its last token. It is the last event."""

    reason: FinishReason
    stop_token_id: int | None
    queue_s: float  # seconds from joining to the first step
    decode_s: float  # seconds from the first step to the last token
    num_preemptions: int


DecodeEntryEvent = Generated | Finished | Failed
DecodeEmitter = Callable[[DecodeEntryEvent], object]


@dataclass
class DecodeEntry(Entry[DecodeEntryEvent]):
    """One request with the tokens that it has sampled.

    `compatibility` is empty if it does not use the cache. Otherwise it is the digest of everything
    that its cached entries depend on, including the draft model if they hold its state.
    """

    outputs: list[int] = field(default_factory=list)
    compatibility: str = ""
    # Output tokens that the last stage knows; None if it has no state of the request.
    num_kept: int | None = None
    draft: DraftState = field(default_factory=DraftState)
    grown: GrownTree | None = None  # on a pool with a draft model
    # The record for the states of its trees; without it the request runs without trees.
    scratch: SlotLease | None = None
    num_due: int = 0  # tokens that batches in flight sample
    joined_s: float = 0.0
    first_step_s: float | None = None
    num_preemptions: int = 0
    preempted_s: float = 0.0

    @cached_property
    def suffixes(self) -> SuffixDraft:
        """Return its drafts on a pool that drafts suffixes."""
        return SuffixDraft()

    @property
    def may_draft(self) -> bool:
        """Return whether its steps may verify drafts."""
        return self.request.speculates and self.scratch is not None

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.outputs)

    @property
    def num_final(self) -> int:
        """Return the number of leading tokens whose cache entries are at their final place.

        If the entries are to hold the draft model's state, that must be complete as well. Accepted
        nodes of a tree are moved to their place only with the next step, and a step ahead may write
        the newest token's entry. Valid for an entry with nothing else in flight.
        """
        if names_draft(self.compatibility) and not self.draft.is_whole:
            return 0
        final = min(self.computed, self.num_tokens - 1)
        return final if self.draft.accepted is None else self.draft.accepted.context_len

    @property
    def num_left(self) -> int:
        """Return the number of tokens that the request's `max_tokens` still allows."""
        return self.request.max_tokens - len(self.outputs)

    def settle(self, mode: ForwardMode, context_len: int, accepted: tuple[int, ...]) -> None:
        """Count the accepted nodes of a step from `context_len` on as computed."""
        if mode is ForwardMode.VERIFY:
            self.draft.accepted = AcceptedNodes(context_len, accepted)
        if mode in DECODING:
            self.advance(self.computed + len(accepted))

    def take(
        self, tokens: Sequence[SampledToken], max_context_tokens: int
    ) -> tuple[list[SampledToken], BatonError | None]:
        """Append the tokens of a step up to the one that ends the request; return these.

        Later tokens are discarded, as if they had never been sampled. A token that could not be
        sampled is the last one, and its error is returned, too.
        """
        taken: list[SampledToken] = []
        for token in tokens:
            if token.error is not None:
                return taken, token.error
            self.outputs.append(token.token_id)
            taken.append(token)
            if self.request.finish_reason(self.outputs, max_context_tokens) is not None:
                break
        return taken, None

    def finished(self, max_context_tokens: int, now_s: float) -> Finished | None:
        """Return the last event if its last token is there, or None."""
        reason = self.request.finish_reason(self.outputs, max_context_tokens)
        if reason is None:
            return None
        first_s = now_s if self.first_step_s is None else self.first_step_s
        stop = self.outputs[-1] if reason is FinishReason.STOP else None
        return Finished(
            reason, stop, first_s - self.joined_s, now_s - first_s, self.num_preemptions
        )

    def ends_with_due(self, max_context_tokens: int) -> bool:
        """Return whether a token in flight is its last one, whatever that token is."""
        longest = min(
            self.request.max_tokens, max_context_tokens - len(self.request.prompt_token_ids)
        )
        return self.num_due > 0 and len(self.outputs) + self.num_due >= longest

    @property
    def scratch_id(self) -> int:
        """Return the index of its scratch record, or of the null record."""
        return NULL_INDEX if self.scratch is None else self.scratch.slot_id

    def lease_scratch(self, scratch: SlotAllocator) -> None:
        """Take a scratch record unless it has one or none is free."""
        if self.scratch is None and (scratch.is_stateless or scratch.num_free):
            self.scratch = scratch.alloc(owner=self.owner)

    def free(self) -> None:
        """Release all of its memory."""
        super().free()
        if self.scratch is not None:
            self.scratch.end()
        self.scratch = None

    def tokens(self, start: int, end: int) -> list[int]:
        prompt = self.request.prompt_token_ids
        return [
            *prompt[start:end],
            *self.outputs[max(0, start - len(prompt)) : max(0, end - len(prompt))],
        ]


@dataclass(frozen=True)
class DecodeLimits:
    """Limits of a decode scheduler.

    `depth` is the number of stages. `max_running` rows are computed at a time; further requests, up
    to `max_held`, take turns. `growth_tokens` are reserved beyond the prompt at admission.

    A pool that speculates verifies up to `num_draft_tokens` per request at once. If recurrent
    layers keep a state per node, only `max_running` requests have trees; the others take plain
    steps until one of those ends.

    With `has_states` no request can resume without a state (GatedDeltaNet, sliding windows), and a
    prefilled token may differ in its bits from a decoded one. A request then replays up to
    `replay_tokens` of its output per step. With `steps_ahead` a step is prepared while the previous
    one computes; only pools of one stage without speculation support it.
    """

    page_size: int
    grid: int
    depth: int
    max_running: int
    max_context_tokens: int
    max_held: int = 0  # 0: the same as `max_running`
    chunk_tokens: int = 512  # tokens of a replay's prefill batches
    growth_tokens: int = 64
    num_draft_tokens: int = 0
    proposers: tuple[Proposer, ...] = ("model",)
    adapts: bool = False  # whether it drafts less where drafts do not pay
    has_states: bool = False
    replay_tokens: int = 1
    local_rest_tokens: int = 0  # most missing prompt tokens that are computed here
    steps_ahead: bool = False

    @property
    def speculates(self) -> bool:
        return self.num_draft_tokens > 0

    @property
    def reads_beside(self) -> bool:
        """Return whether prefill tokens fit into a batch with decode steps.

        They do unless the steps verify trees or layers keep states.
        """
        return not self.speculates and not self.has_states
