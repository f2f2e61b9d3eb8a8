"""Best observed prefill rate.

Routers use it to reject requests on arrival, prefill workers to reject them later, and to decide
whether to compute tokens or to copy them from elsewhere.
"""

from collections import deque

from runtime.clock import Clock

MEMORY_S = 60.0
MIN_TOKENS = 64  # in shorter prompts, overhead dominates the measurement
MIN_PROMPTS = 3  # a single one may include a cold start
REMEMBERED_PROMPTS = 64


class PrefillRateEstimate:
    """Seconds per prompt token, from prefills that ended within the last `MEMORY_S`.

    Only the best recent rate counts: a request is rejected if even that rate cannot meet its
    deadline, and tried otherwise. A rejected request yields no measurement, so rates expire after
    `MEMORY_S`, and a rejection needs `MIN_PROMPTS` measurements.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen_s: deque[float] = deque(maxlen=MIN_PROMPTS)  # times of the latest measurements
        self._latest: deque[float] = deque(maxlen=MIN_PROMPTS)  # their seconds per token
        # (time, seconds per token). Each entry is slower than the one before it: an entry that a
        # later one beats is dropped.
        self._best: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_PROMPTS)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record a prefill of `num_tokens` tokens that took `seconds`."""
        if num_tokens < MIN_TOKENS:
            return
        token_s = seconds / num_tokens
        while self._best and self._best[-1][1] >= token_s:
            self._best.pop()
        self._best.append((self._clock.now(), token_s))
        self._seen_s.append(self._clock.now())
        self._latest.append(token_s)

    def least_s(self, num_tokens: int) -> float:
        """Return the shortest expected time of `num_tokens` tokens in seconds.

        Returns 0 while too few prompts were measured, and for short prompts.
        """
        oldest_s = self._clock.now() - MEMORY_S
        while self._best and self._best[0][0] < oldest_s:
            self._best.popleft()
        if num_tokens < MIN_TOKENS or len(self._seen_s) < MIN_PROMPTS or self._seen_s[0] < oldest_s:
            return 0.0
        return num_tokens * self._best[0][1]

    def likely_s(self, num_tokens: int) -> float:
        """Return `least_s`, or the time by the latest measurements, however few and old they are.

        For decisions that cost little if they are wrong. Returns 0 before the first measurement, and
        for short prompts.
        """
        if num_tokens < MIN_TOKENS:
            return 0.0
        return self.least_s(num_tokens) or num_tokens * min(self._latest, default=0.0)
