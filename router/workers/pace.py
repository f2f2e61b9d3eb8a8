"""Speed of workers as the router observes it. Pure; times are `Clock` seconds.

Measurements lose weight with age, and are dropped if not confirmed for a while. Otherwise a pool
that was slow once would get no request that could show its recovery.
"""

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from router.workers.candidate import SHORT_RATIO, SHORT_SHARE
from runtime.clock import Clock
from runtime.pace import MIN_TOKENS

HALF_LIFE_S = 5.0  # of busy time
MIN_PROMPTS = 3  # a single prompt may have met a cold start
MIN_GENERATED = 32  # tokens: the first one after a start may have taken as long as a hundred others
MEMORY_S = 30.0
KEPT_SHARE = 0.9  # of the previous weight, per response


@dataclass
class PrefillPace:
    """Prompt tokens per second of a pool while it has prompts to compute.

    Under load that is its throughput, else the speed of single prompts. Time without prompts does
    not count.

    Tokens count when the pool reports them or when their prompt ends, whichever comes first, so
    that a long prompt does not look like a stalled pool. Silence counts once it lasts longer than
    twice the usual gap.
    """

    clock: Clock
    num_computing: int = 0
    _tokens: float = 0.0
    _busy_s: float = 0.0
    _num_prompts: int = 0
    _counted_until_s: float = 0.0
    _gap_s: float = 0.0  # longest recent gap between counted tokens
    # Since the pool was idle: tokens that it reported, tokens of ended prompts, and counted tokens.
    _reported: float = 0.0
    _ended: float = 0.0
    _counted: float = 0.0
    _is_fresh: bool = True  # the next report includes tokens from before the idle time
    _num_known: int | None = None  # tokens of the last report

    def began(self) -> None:
        """Record that the pool was given a prompt."""
        if not self.num_computing:
            self._counted_until_s = self.clock.now()
            self._reported = self._ended = self._counted = 0.0
            self._is_fresh = True
        self.num_computing += 1

    def introduced(self) -> None:
        """Record that the pool's reports start from zero."""
        self._num_known = None

    def reported(self, num_computed: int, num_left: int, num_ahead: int) -> None:
        """Apply a report: prompt tokens computed since the pool's start, and tokens left.

        At the previous report `num_ahead` of the queued tokens were this router's. The same share
        of the tokens computed since is attributed to it.
        """
        known = self._num_known
        self._num_known = num_computed
        if known is None or not self.num_computing:
            return
        num_new = num_computed - known
        is_fresh = self._is_fresh
        self._is_fresh = False
        if num_new > 0 and not is_fresh:
            self._reported += num_new * min(1.0, num_ahead / (num_new + num_left))
            self._count()

    def ended(self, num_tokens: int) -> None:
        """Record the end of a prompt with `num_tokens` computed; 0 if it was cancelled.

        Few tokens count as `MIN_TOKENS`: most of their time is overhead, and would make an uncached
        prompt look endless.
        """
        self.num_computing = max(0, self.num_computing - 1)
        self._ended += max(num_tokens, MIN_TOKENS) if num_tokens else 0
        self._num_prompts += num_tokens > 0
        self._count()
        if not self.num_computing:
            self._count_time()

    def restarted(self) -> None:
        """Record a restart of the pool: its prompts are lost."""
        if self._is_silent:
            self._count_time()
        self.num_computing = 0

    @property
    def tokens_under_way(self) -> float:
        """Return the tokens that the pool has reported of prompts that have not ended."""
        return max(0.0, self._reported - self._ended) if self.num_computing else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Return the rate; None until a few prompts were computed.

        Changes no state: every request calls it for many pools.
        """
        if self._num_prompts < MIN_PROMPTS:
            return None
        tokens, busy_s = self._weighed() if self._is_silent else (self._tokens, self._busy_s)
        return tokens / busy_s if busy_s > 0 else None

    @property
    def _is_silent(self) -> bool:
        """Return whether newly computed tokens are overdue."""
        return self.num_computing > 0 and self.clock.now() - self._counted_until_s > 2 * self._gap_s

    def _count(self) -> None:
        """Count the tokens newly reported or ended."""
        known = max(self._reported, self._ended)
        if known > self._counted:
            passed_s = self.clock.now() - self._counted_until_s
            self._gap_s = max(passed_s, self._gap_s * KEPT_SHARE)
            self._count_time()
            self._tokens += known - self._counted
            self._counted = known

    def _count_time(self) -> None:
        self._tokens, self._busy_s = self._weighed()
        self._counted_until_s = self.clock.now()

    def _weighed(self) -> tuple[float, float]:
        """Return decayed tokens and busy seconds for a pool that was busy since the last change."""
        passed_s = self.clock.now() - self._counted_until_s
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        return self._tokens * kept, self._busy_s * kept + passed_s


@dataclass(frozen=True)
class PromptsAhead:
    """Prompts queued on `num_workers` workers: ascending lengths and their prefix sums.

    A prompt does not wait for much longer ones: workers give one token in `SHORT_SHARE` to short
    prompts meanwhile.
    """

    lengths: tuple[float, ...] = ()
    sums: tuple[float, ...] = (0.0,)
    num_workers: int = 1

    @classmethod
    def of(cls, lengths: Iterable[float], num_workers: int = 1) -> Self:
        """Return the prompts of these workers together."""
        ascending = sorted(lengths)
        return cls(tuple(ascending), tuple(accumulate(ascending, initial=0.0)), num_workers)

    def before(self, num_tokens: float) -> float:
        """Return the tokens that one worker computes before a prompt of `num_tokens` ends,
        excluding its own.
        """
        num_short = bisect.bisect(self.lengths, SHORT_RATIO * num_tokens)
        short = self.sums[num_short]
        longer = self.sums[-1] - self.sums[num_short]
        num_shared = min(len(self.lengths) - num_short, self.num_workers)  # workers with a long one
        return (
            short + min((SHORT_SHARE - 1) * (short + num_tokens * num_shared), longer)
        ) / self.num_workers


@dataclass
class _DecayedSums:
    """Decayed sums over the responses of one load; `num_tokens` is not decayed."""

    tokens: float = 0.0
    seconds: float = 0.0
    seen_s: float = 0.0
    num_tokens: int = 0

    def add(self, num_tokens: int, seconds: float, now_s: float) -> None:
        self.num_tokens += num_tokens
        self.tokens = self.tokens * KEPT_SHARE + num_tokens
        self.seconds = self.seconds * KEPT_SHARE + seconds
        self.seen_s = now_s


@dataclass
class DecodePace:
    """Time between two tokens of one response, by the number of requests that share the pool.

    Loads are grouped by powers of two; a group counts once it has generated `MIN_GENERATED` tokens.
    """

    clock: Clock
    _by_load: dict[int, _DecayedSums] = field(default_factory=dict)
    _found: dict[int, tuple[float | None, float]] = field(default_factory=dict)  # (s, valid until)

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Record a response with `num_tokens` in `seconds`, at a load of `num_requests` including
        itself.
        """
        if num_tokens < 1 or seconds <= 0:
            return
        sample = self._by_load.setdefault(max(1, num_requests).bit_length(), _DecayedSums())
        sample.add(num_tokens, seconds, self.clock.now())
        self._found.clear()

    def token_s(self, num_requests: int) -> float | None:
        """Return the seconds between tokens at this load; None without enough measurements.

        Falls back to the nearest lower load seen recently, which is optimistic, else to the nearest
        higher one.
        """
        load = num_requests.bit_length() or 1
        now_s = self.clock.now()
        found = self._found.get(load)  # cached, because every request asks many pools
        if found is None or found[1] < now_s:
            found = self._found[load] = self._look(load, now_s)
        return found[0]

    def _look(self, wanted: int, now_s: float) -> tuple[float | None, float]:
        """Compute `token_s`, and until when it holds without a new response."""
        lately = {
            load: sample
            for load, sample in self._by_load.items()
            if sample.num_tokens >= MIN_GENERATED and sample.seen_s + MEMORY_S >= now_s
        }
        if not lately:
            return None, math.inf
        sample = lately[max((load for load in lately if load <= wanted), default=min(lately))]
        return sample.seconds / sample.tokens, min(
            each.seen_s for each in lately.values()
        ) + MEMORY_S


@dataclass
class AnswerPace:
    """Duration of responses of a decode pool, and the delay caused by transferring their prompts.

    Pages that land before their prompt is computed cause no delay.
    """

    clock: Clock
    _responses: _DecayedSums = field(default_factory=_DecayedSums)
    _handoffs: _DecayedSums = field(default_factory=_DecayedSums)

    def answered(self, seconds: float) -> None:
        """Record the duration of a response."""
        self._responses.add(1, seconds, self.clock.now())

    def record_handoff(self, num_tokens: int, waited_s: float) -> None:
        """Record that `num_tokens` missing prompt tokens landed `waited_s` after the first token.

        Few tokens count as `MIN_TOKENS`: most of their time is overhead.
        """
        self._handoffs.add(max(num_tokens, MIN_TOKENS), waited_s, self.clock.now())

    @property
    def answer_s(self) -> float:
        """Return the mean duration of a response in seconds; 0 before the first."""
        return self._responses.seconds / self._responses.tokens if self._responses.tokens else 0.0

    @property
    def token_share(self) -> float:
        """Return the relative increase of a response's duration per transferred token, from recent
        handoffs.
        """
        is_known = (
            self._responses.seconds > 0 and self._handoffs.seen_s >= self.clock.now() - MEMORY_S
        )
        return (
            self._handoffs.seconds / self._handoffs.tokens / self.answer_s
            if is_known and self._handoffs.tokens
            else 0.0
        )
