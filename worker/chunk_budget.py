"""The length of prompt chunks between the steps of running requests.

A chunk delays the next token of every running request. So the budget follows the time that chunks
have taken: it shrinks at once when one takes longer than allowed, and grows at most twofold per
chunk. Belongs to the engine thread.
"""

from dataclasses import dataclass

STEP_RATIO = 2.0  # without `max_step_s`, a chunk may take as long as this number of decode steps
MEMORY = 0.8  # weight of earlier decode steps in their mean
MOST_GROWTH = 2.0
FULL_USE = 0.5  # a chunk of less than this share of the budget says nothing about it


@dataclass
class ChunkBudget:
    """The most tokens of a chunk while requests decode.

    `chunk_tokens` is the upper and `grid` the lower limit. With `max_step_s` 0 a chunk may take
    `STEP_RATIO` decode steps.
    """

    chunk_tokens: int
    grid: int
    max_step_s: float = 0.0
    _tokens: float = 0.0  # 0: no chunk was measured beside decode steps
    _step_s: float = 0.0  # mean duration of a decode step; 0: not measured

    @property
    def tokens(self) -> int:
        """Return the budget of the next chunk, a multiple of the grid."""
        if not self._tokens:
            return self.chunk_tokens
        return max(int(self._tokens) // self.grid * self.grid, self.grid)

    @property
    def allowed_s(self) -> float:
        """Return how long a chunk may take, in seconds; 0 while that is not known."""
        return self.max_step_s or STEP_RATIO * self._step_s

    def stepped(self, seconds: float) -> None:
        """Record the duration of a decode step."""
        self._step_s = MEMORY * self._step_s + (1 - MEMORY) * seconds if self._step_s else seconds

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record a chunk that running requests waited for."""
        budget = self._tokens or self.chunk_tokens
        if not self.allowed_s or not seconds:
            return
        ratio = self.allowed_s / seconds
        if ratio >= 1 and num_tokens < FULL_USE * budget:
            return
        wanted = num_tokens * min(ratio, MOST_GROWTH)
        self._tokens = min(max(wanted, self.grid), self.chunk_tokens)
