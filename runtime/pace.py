"""How fast prompts are computed at best: what routers refuse by on arrival, and prefill workers later on."""

from collections import deque

from runtime.clock import Clock

MEMORY_S = 60.0
MIN_TOKENS = 64  # shorter prompts measure overheads rather than prefill
MIN_PROMPTS = 3  # one alone may have met a cold start
REMEMBERED_PROMPTS = 64


class PrefillRateEstimate:
    """Seconds per prompt token, as prefills that ended within the last `MEMORY_S` showed it.

    Only the best rate seen lately counts: what even that cannot do in time is refused, everything else is tried. A
    refused request shows no rate, so rates expire after `MEMORY_S`, and a refusal needs `MIN_PROMPTS` of them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_PROMPTS)  # when, seconds per token

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A prompt was computed."""
        if num_tokens >= MIN_TOKENS:
            self._seen.append((self._clock.now(), seconds / num_tokens))

    def least_s(self, num_tokens: int) -> float:
        """The time that many tokens take at best; 0 while too few prompts are known, or for too few tokens."""
        oldest_s = self._clock.now() - MEMORY_S
        rates = [prefill_rate for at_s, prefill_rate in self._seen if at_s >= oldest_s]
        return num_tokens * min(rates) if num_tokens >= MIN_TOKENS and len(rates) >= MIN_PROMPTS else 0.0
