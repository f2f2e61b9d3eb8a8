"""A request on a decode pool: what its stream hears of it, and what the scheduler knows about it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from decode.speculation import DraftState
from engine.core.request import DrawnToken, FinishReason, Request
from engine.memory.pages import PageLease
from engine.memory.slots import SlotLease
from runtime.errors import BatonError


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


@dataclass(frozen=True)
class Failed:
    error: BatonError


Event = Drawn | Finished | Failed
Emit = Callable[[Event], object]


@dataclass
class Entry:
    """Belongs to the scheduler."""

    key: int
    request: Request
    emit: Emit
    pages: PageLease | None = None  # None while waiting
    slot: SlotLease | None = None
    outputs: list[int] = field(default_factory=list)
    computed: int = 0  # tokens of prompt + outputs whose cache entries exist or are in flight (a tree's do not count)
    told: int | None = None  # tokens of the output that the last stage keeps; None: it knows nothing of the request
    draft: DraftState = field(default_factory=DraftState)
    running: bool = False  # has its memory filled and may be scheduled
    in_flight: bool = False
    released: bool = False
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

    @property
    def owner(self) -> str:
        """In the ledgers of pages and slots."""
        return f"request {self.key}"

    def tokens(self, start: int, end: int) -> list[int]:
        prompt = self.request.prompt_token_ids
        return [*prompt[start:end], *self.outputs[max(0, start - len(prompt)):max(0, end - len(prompt))]]

    def free(self) -> None:
        for lease in (self.pages, self.slot):
            if lease is not None:
                lease.end()
        self.pages = self.slot = None
