"""A prompt on a prefill pool: the events that its stream gets, and the scheduler's state of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.request import DrawnToken
from engine.memory.leases import SlotLease
from engine.sampling.sampler import Scores
from pool.request.entry import Entry, Failed


@dataclass(frozen=True)
class Started:
    """The request's turn has come; this is the memory its prompt will fill, whose first `num_cached` tokens are there
    already."""

    page_ids: tuple[int, ...]
    slot_id: int
    queue_s: float
    num_cached: int = 0


@dataclass(frozen=True)
class Scored:
    """What the model made of one chunk's tokens, the first of which stands at `first_position` of the prompt."""

    first_position: int
    tokens: Scores


@dataclass(frozen=True)
class FirstToken:
    token: DrawnToken
    prefill_s: float


Event = Started | Scored | FirstToken | Failed
Emit = Callable[[Event], object]


@dataclass
class PrefillEntry(Entry[Event]):
    """One prompt. `blocks` are its pages' names in the cache, as far as they are full; none where it takes no part.
    `awaited` is the one that another prompt was computing when this one was looked at last.

    Its first `num_cached` tokens were there when it began, and the state after them in the slot `resumed`, which is
    held until the row that copies it is over. `wanted_snapshots`: after so many tokens, in order, its states are worth
    keeping; `snapshots`: those that rows in flight hand out, and where.
    """

    blocks: tuple[bytes, ...] = ()
    awaited: bytes = b""
    num_cached: int = 0
    resumed: SlotLease | None = None
    wanted_snapshots: tuple[int, ...] = ()
    snapshots: list[tuple[int, SlotLease]] = field(default_factory=list)
    has_failed: bool = False
    arrived_s: float = 0.0
    started_s: float = 0.0

    def free(self) -> None:
        """Give everything back."""
        super().free()
        for lease in (self.resumed, *(lease for _, lease in self.snapshots)):
            if lease is not None:
                lease.end()

    @property
    def remaining(self) -> int:
        return len(self.request.prompt_token_ids) - self.computed

    @property
    def wanted_blocks(self) -> tuple[bytes, ...]:
        """Those it need not compute if they are there: none where every token is to be scored."""
        return self.blocks if self.request.num_prompt_logprobs is None else ()

    @property
    def turn(self) -> tuple[int, int]:
        """Less is sooner: keys grow with arrival."""
        return self.request.priority, self.key


@dataclass(frozen=True)
class PrefillLimits:
    """`chunk_tokens` bounds the tokens of one batch; `grid` is the model's (chunks end on its multiples). With
    `drafts` a draft on the last stage reads the prompts too."""

    page_size: int
    chunk_tokens: int
    grid: int
    max_running: int
    max_queued: int
    drafts: bool = False
