"""Where prompts can resume from a prefix cache."""

from dataclasses import dataclass
from functools import cached_property
from math import gcd


@dataclass(frozen=True)
class ResumeRule:
    """The rule of where prompts can resume.

    `block_tokens` are the tokens of a page. Prompts are split only at multiples of `grid_tokens`,
    so only these are resume points. With `has_states` no prompt can resume without a recurrent
    state; it is False for a pool whose states arrive with their requests.
    """

    block_tokens: int
    grid_tokens: int = 1
    has_states: bool = False

    def last_point(self, num_tokens: int) -> int:
        """Return the deepest resume point, in blocks, of a prompt of `num_tokens`.

        The last token is always computed, because the next one is sampled from its output.
        """
        return self.point_before(max((num_tokens - 1) // self.block_tokens, 0))

    def point_before(self, depth: int) -> int:
        """Return the deepest resume point at or before this number of blocks."""
        return depth - depth % self._step

    def is_point(self, depth: int) -> bool:
        """Return whether a prompt may be split after this number of blocks."""
        return depth * self.block_tokens % self.grid_tokens == 0

    def points(self, depths: range) -> range:
        """Return those of consecutive depths after which a prompt may be split."""
        return range(-(-depths.start // self._step) * self._step, depths.stop, self._step)

    @cached_property
    def _step(self) -> int:
        """Return the number of blocks from one resume point to the next."""
        return self.grid_tokens // gcd(self.grid_tokens, self.block_tokens)
