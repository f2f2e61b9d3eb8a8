"""How fast prompts are computed at best: what routers refuse by on arrival, and prefill workers
later on."""

from collections import deque

from runtime.clock import Clock

MEMORY_S = 60.0
MIN_TOKENS = 64  # shorter prompts measure overheads rather than prefill
MIN_PROMPTS = 3  # one alone may have met a cold start
REMEMBERED_PROMPTS = 64


class PrefillRateEstimate:
    """Seconds per prompt token, as prefills that ended within the last `MEMORY_S` showed it.

    Only the best rate seen lately counts: what even that cannot do in time is refused, everything
    else is tried. A refused request shows no rate, so rates expire after `MEMORY_S`, and a refusal
    needs `MIN_PROMPTS` of them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen_s: deque[float] = deque(maxlen=MIN_PROMPTS)  # when the last ones were
        # When, and seconds per token: each slower than the one before it, as what a later one
        # surpasses counts no more.
        self._best: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_PROMPTS)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A prompt was computed."""
        if num_tokens < MIN_TOKENS:
            return
        token_s = seconds / num_tokens
        while self._best and self._best[-1][1] >= token_s:
            self._best.pop()
        self._best.append((self._clock.now(), token_s))
        self._seen_s.append(self._clock.now())

    def least_s(self, num_tokens: int) -> float:
        """The time that many tokens take at best; 0 while too few prompts are known, or for too few
        tokens."""
        oldest_s = self._clock.now() - MEMORY_S
        while self._best and self._best[0][0] < oldest_s:
            self._best.popleft()
        if num_tokens < MIN_TOKENS or len(self._seen_s) < MIN_PROMPTS or self._seen_s[0] < oldest_s:
            return 0.0
        return num_tokens * self._best[0][1]
