"""The tiers that a prompt's cached tokens came from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiers:
    """The number of a prompt's first tokens that a pool had in memory, or copied for it.

    Those up to `num_held` were in memory, those up to `pulled_to` came from another worker, and
    those up to `read_to` from disk.
    """

    num_held: int = 0
    pulled_to: int = 0
    read_to: int = 0

    def counts(self, num_cached: int) -> dict[str, int]:
        """Return `pulled_tokens` and `disk_tokens` among the first `num_cached` tokens."""
        held_to = min(num_cached, self.num_held)
        pulled_to = min(num_cached, max(held_to, self.pulled_to))
        read_to = min(num_cached, max(pulled_to, self.read_to))
        return {"pulled_tokens": pulled_to - held_to, "disk_tokens": read_to - pulled_to}
