"""Workers as placement sees them: immutable snapshots with their load and their room."""

import math
from typing import NamedTuple

# A prompt does not wait for one at least this many times as long: it gets one token in
# `SHORT_SHARE` meanwhile.
SHORT_RATIO = 4
SHORT_SHARE = 4


class Candidate(NamedTuple):
    """One worker as a policy sees it.

    Loads compare within one role only: queued prompt tokens for prefill workers, the used share of
    a pool for decode workers. `token_load` is the load added by each token that the worker lacks,
    transfer included. `load_s` is the time in seconds that one more unit of load costs a request, 0
    before a measurement.
    """

    address: str
    load: float
    token_load: float = 1.0
    load_s: float = 0.0


class WorkerSnapshot(NamedTuple):
    """Immutable view of a worker used for placement, as of its last report or booking.

    `longest` is the sequence length that it can hold, in tokens, below 0 while it is unusable.
    `candidate` is the worker as policies see it. `has_place` means that a prefill worker would
    queue one more prompt, or that a decode pool is given one more request. `tokens_left` is the
    largest request it would accept: the tokens in free pages of a decode pool, -1 without a place.
    `prompts_ahead` are the tokens of each queued prompt of a busy prefill worker, for which
    `busy_tokens` are enough work; `tokens_ahead` is their sum, `longest_ahead` the longest.
    """

    longest: float
    compatibility: str
    page_size: int
    candidate: Candidate
    has_place: bool
    tokens_left: float
    prompts_ahead: tuple[int, ...] = ()
    busy_tokens: float = math.inf
    tokens_ahead: int = 0
    longest_ahead: int = 0

    def has_room(self, num_tokens: int, context_tokens: int = 0) -> bool:
        """Return whether a prompt of `num_tokens` fits; `context_tokens` as for `Worker.book`."""
        if self.prompts_ahead:
            if self.busy_tokens > self.tokens_ahead:
                return self.has_place
            most = SHORT_RATIO * num_tokens
            if not self.has_place or most >= self.longest_ahead:
                return False
            # Much longer prompts take their share of tokens only while short ones are queued.
            short = [ahead for ahead in self.prompts_ahead if ahead < most]
            longer = most * (len(self.prompts_ahead) - len(short))
            return self.busy_tokens > sum(short) + min(longer, (SHORT_SHARE - 1) * sum(short))
        # The upper bound of the reservation is compared first: every choice asks every worker.
        return (
            num_tokens + self.page_size <= self.tokens_left
            or reserved_tokens(num_tokens, context_tokens, self.page_size) <= self.tokens_left
        )


def reserved_tokens(num_tokens: int, context_tokens: int, page_size: int) -> int:
    """Return the tokens for which a decode pool reserves pages.

    That is the prompt and one page of growth, but at most the request's maximum length.
    """
    grown = num_tokens + page_size
    return (
        grown if not context_tokens or grown <= context_tokens else max(num_tokens, context_tokens)
    )
