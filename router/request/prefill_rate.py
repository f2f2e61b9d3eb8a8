"""How fast prefill goes, so that a request whose time cannot suffice is refused before it takes anybody else's.

Only the best pace seen lately counts: what even that cannot do in time is hopeless, everything else is tried. What is
refused shows no pace, so what was seen is forgotten after a while, and a few prompts must agree before any is refused.
"""

from collections import deque

from runtime.clock import Clock

MIN_TOKENS = 64  # shorter prompts say more about overheads than about pace
MIN_PROMPTS = 3  # one alone may have met a cold start
MEMORY_S = 60.0
REMEMBERED = 64


class PrefillRateEstimate:
    """Seconds per prompt token, as prefills that ended within the last `MEMORY_S` showed it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # when, seconds per token

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A prompt was computed."""
        if num_tokens >= MIN_TOKENS:
            self._seen.append((self._clock.now(), seconds / num_tokens))

    def least_s(self, num_tokens: int) -> float:
        """The time that many tokens take at best; 0 while too little is known, or for too few to tell."""
        oldest_s = self._clock.now() - MEMORY_S
        rates = [prefill_rate for at_s, prefill_rate in self._seen if at_s >= oldest_s]
        return num_tokens * min(rates) if num_tokens >= MIN_TOKENS and len(rates) >= MIN_PROMPTS else 0.0
