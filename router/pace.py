"""How fast prefill goes, so that a request whose time cannot suffice is refused before it takes anybody else's.

Only the best pace seen lately counts: what even that cannot do in time is hopeless, everything else is tried.
"""

from collections import deque

MIN_TOKENS = 64  # shorter prompts say more about overheads than about pace
REMEMBERED = 64


class PrefillPace:
    """Seconds per prompt token, as finished prefills showed it."""

    def __init__(self) -> None:
        self._seconds_per_token: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A prompt was computed."""
        if num_tokens >= MIN_TOKENS:
            self._seconds_per_token.append(seconds / num_tokens)

    def least_s(self, num_tokens: int) -> float:
        """The time that many tokens take at best; 0 while nothing is known, or for too few to tell."""
        if not self._seconds_per_token or num_tokens < MIN_TOKENS:
            return 0.0
        return num_tokens * min(self._seconds_per_token)
