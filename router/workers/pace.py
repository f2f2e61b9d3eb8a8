"""How fast workers are, from what the router sees of them. Pure; time is that of a `Clock`.

Speed is weighed the less the older it is, and what was not confirmed for a while is dropped: a pool
that was slow once would otherwise get nothing by which it could show that it is not any more.
"""

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from router.workers.policy import SHORT_RATIO, SHORT_SHARE
from runtime.clock import Clock
from runtime.pace import MIN_TOKENS

HALF_LIFE_S = 5.0  # of busy time
MIN_PROMPTS = 3  # one alone may have met a cold start
MIN_DRAWN = 32  # tokens: the first one after a start may have taken as long as a hundred others
MEMORY_S = 30.0
KEPT_SHARE = 0.9  # of what came before, per answer


@dataclass
class PrefillPace:
    """Prompt tokens per second of a pool while it has prompts to compute: under load that is its
    throughput, else the speed of single prompts. Time without prompts does not count.

    Tokens count when the pool reports them or when their prompt ends, whichever comes first, so
    that a long prompt does not look like a pool that stands still. Silence counts once it lasts
    longer than twice what was usual.
    """

    clock: Clock
    num_computing: int = 0
    _tokens: float = 0.0
    _busy_s: float = 0.0
    _num_prompts: int = 0
    _counted_until_s: float = 0.0
    _gap_s: float = 0.0  # between tokens that were counted, the longest of late
    # Since the pool was idle: tokens that it reported, those of prompts that ended, and those that
    # were counted.
    _reported: float = 0.0
    _ended: float = 0.0
    _counted: float = 0.0
    _is_fresh: bool = True  # the next report tells of tokens from before
    _num_known: int | None = None  # tokens of the last report

    def began(self) -> None:
        """The pool was given a prompt."""
        if not self.num_computing:
            self._counted_until_s = self.clock.now()
            self._reported = self._ended = self._counted = 0.0
            self._is_fresh = True
        self.num_computing += 1

    def introduced(self) -> None:
        """The pool's reports begin anew."""
        self._num_known = None

    def reported(self, num_computed: int, num_left: int, num_ahead: int) -> None:
        """The pool has computed so many tokens of prompts since its start and has so many left. Of
        what it had when it reported last, `num_ahead` were this router's, and so was their share of
        what it has computed since."""
        known, self._num_known = self._num_known, num_computed
        if known is None or not self.num_computing:
            return
        num_new, is_fresh, self._is_fresh = num_computed - known, self._is_fresh, False
        if num_new > 0 and not is_fresh:
            self._reported += num_new * min(1.0, num_ahead / (num_new + num_left))
            self._count()

    def ended(self, num_tokens: int) -> None:
        """A prompt was computed, so many tokens of it; 0: it was given up. Few tokens count as
        `MIN_TOKENS`: most of their time is none of theirs, and a prompt that no cache has would
        seem to take for ever."""
        self.num_computing = max(0, self.num_computing - 1)
        self._ended += max(num_tokens, MIN_TOKENS) if num_tokens else 0
        self._num_prompts += num_tokens > 0
        self._count()
        if not self.num_computing:
            self._count_time()

    def restarted(self) -> None:
        """The pool started anew: what it was given is gone."""
        if self._is_silent:
            self._count_time()
        self.num_computing = 0

    @property
    def tokens_under_way(self) -> float:
        """Tokens that the pool has reported of prompts that have not ended."""
        return max(0.0, self._reported - self._ended) if self.num_computing else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None until a few prompts were computed. Asking changes nothing: every request asks of
        many pools."""
        if self._num_prompts < MIN_PROMPTS:
            return None
        tokens, busy_s = self._weighed() if self._is_silent else (self._tokens, self._busy_s)
        return tokens / busy_s if busy_s > 0 else None

    @property
    def _is_silent(self) -> bool:
        """Whether the pool should have computed something since the last tokens that were
        counted."""
        return self.num_computing > 0 and self.clock.now() - self._counted_until_s > 2 * self._gap_s

    def _count(self) -> None:
        """Count what is new of the tokens that were reported or have ended."""
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
        """Tokens and seconds, of a pool that was busy since the last change."""
        passed_s = self.clock.now() - self._counted_until_s
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        return self._tokens * kept, self._busy_s * kept + passed_s


@dataclass(frozen=True)
class PromptsAhead:
    """Prompts that `num_workers` have and have not computed: their lengths, ascending, and the sums
    of these. A prompt does not wait for those that are much longer: beside them workers give one
    token in `SHORT_SHARE` to short ones."""

    lengths: tuple[float, ...] = ()
    sums: tuple[float, ...] = (0.0,)
    num_workers: int = 1

    @classmethod
    def of(cls, lengths: Iterable[float], num_workers: int = 1) -> Self:
        """Of all of these workers together."""
        ascending = sorted(lengths)
        return cls(tuple(ascending), tuple(accumulate(ascending, initial=0.0)), num_workers)

    def before(self, num_tokens: float) -> float:
        """Return the tokens that one worker computes before a prompt of so many is over, its own
        left out."""
        num_short = bisect.bisect(self.lengths, SHORT_RATIO * num_tokens)
        short, longer = self.sums[num_short], self.sums[-1] - self.sums[num_short]
        num_shared = min(
            len(self.lengths) - num_short, self.num_workers
        )  # workers that have a much longer one
        return (
            short + min((SHORT_SHARE - 1) * (short + num_tokens * num_shared), longer)
        ) / self.num_workers


@dataclass
class _Sample:
    """Weighed sums over the answers of one load; `num_tokens` counts all of them, whatever they
    weigh by now."""

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
    """Time between two tokens of one answer by how many requests share the pool. Loads of one power
    of two are one; one counts once it has drawn `MIN_DRAWN` tokens."""

    clock: Clock
    _by_load: dict[int, _Sample] = field(default_factory=dict)
    _found: dict[int, tuple[float | None, float]] = field(
        default_factory=dict
    )  # by load, and until when it holds

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """An answer got `num_tokens` in so many seconds beside `num_requests`, itself included."""
        if num_tokens < 1 or seconds <= 0:
            return
        sample = self._by_load.setdefault(max(1, num_requests).bit_length(), _Sample())
        sample.add(num_tokens, seconds, self.clock.now())
        self._found.clear()

    def token_s(self, num_requests: int) -> float | None:
        """At this load, or at the nearest lower one that was seen lately, which promises rather too
        much; without any at the nearest higher one. None when nothing was seen, or too little."""
        load, now_s = num_requests.bit_length() or 1, self.clock.now()
        found = self._found.get(load)  # every request asks this of many pools
        if found is None or found[1] < now_s:
            found = self._found[load] = self._look(load, now_s)
        return found[0]

    def _look(self, wanted: int, now_s: float) -> tuple[float | None, float]:
        """What `token_s` says, and until when: unless another answer comes before."""
        lately = {
            load: sample
            for load, sample in self._by_load.items()
            if sample.num_tokens >= MIN_DRAWN and sample.seen_s + MEMORY_S >= now_s
        }
        if not lately:
            return None, math.inf
        sample = lately[max((load for load in lately if load <= wanted), default=min(lately))]
        return sample.seconds / sample.tokens, min(
            each.seen_s for each in lately.values()
        ) + MEMORY_S


@dataclass
class AnswerPace:
    """How long answers of a decode pool take, and how much longer for bytes of their prompts: those
    that came before their prompt was computed cost nothing."""

    clock: Clock
    _answers: _Sample = field(default_factory=_Sample)
    _landed: _Sample = field(default_factory=_Sample)

    def answered(self, seconds: float) -> None:
        """An answer took so long."""
        self._answers.add(1, seconds, self.clock.now())

    def landed(self, num_tokens: int, waited_s: float) -> None:
        """What was missing of a prompt, so many tokens, came so long after its first token. Few
        count as `MIN_TOKENS`: most of their time is none of theirs."""
        self._landed.add(max(num_tokens, MIN_TOKENS), waited_s, self.clock.now())

    @property
    def answer_s(self) -> float:
        """0 before the first."""
        return self._answers.seconds / self._answers.tokens if self._answers.tokens else 0.0

    @property
    def token_share(self) -> float:
        """Of an answer's time, what one more token that has to be sent adds to it; by what landed
        lately."""
        is_known = self._answers.seconds > 0 and self._landed.seen_s >= self.clock.now() - MEMORY_S
        return (
            self._landed.seconds / self._landed.tokens / self.answer_s
            if is_known and self._landed.tokens
            else 0.0
        )
