"""A request on a decode pool: what its stream hears of it, and what the scheduler knows about it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from decode.speculation import DraftState
from engine.core.request import DrawnToken, FinishReason
from engine.memory.slots import SlotAllocator, SlotLease
from pool.request.entry import Entry, Failed


@dataclass(frozen=True)
class Drawn:
    """The request's next tokens: one, or several where drafted ones were accepted."""

    tokens: tuple[DrawnToken, ...]


@dataclass(frozen=True)
class Finished:
    reason: FinishReason
    stop_token_id: int | None
    queue_s: float  # joined to first step
    decode_s: float  # first step to last token
    num_preemptions: int


Event = Drawn | Finished | Failed
Emit = Callable[[Event], object]


@dataclass
class DecodeEntry(Entry[Event]):
    """One request, with what it has drawn."""

    outputs: list[int] = field(default_factory=list)
    told: int | None = None  # tokens of the output that the last stage keeps; None: it knows nothing of the request
    draft: DraftState = field(default_factory=DraftState)
    scratch: SlotLease | None = None  # where the states of its trees are kept; without it runs without trees
    running: bool = False  # has its memory filled and may be scheduled
    joined_s: float = 0.0
    first_step_s: float | None = None
    num_preemptions: int = 0
    preempted_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.outputs)

    @property
    def num_left(self) -> int:
        """Tokens it may still draw, as far as the request goes."""
        return self.request.max_tokens - len(self.outputs)

    def lease_scratch(self, scratch: SlotAllocator) -> None:
        """Take a record unless it has one, or none is free."""
        if self.scratch is None and (scratch.is_stateless or scratch.num_free):
            self.scratch = scratch.alloc(owner=self.owner)

    def free(self) -> None:
        """Give everything back."""
        super().free()
        if self.scratch is not None:
            self.scratch.end()
        self.scratch = None

    def tokens(self, start: int, end: int) -> list[int]:
        prompt = self.request.prompt_token_ids
        return [*prompt[start:end], *self.outputs[max(0, start - len(prompt)):max(0, end - len(prompt))]]
