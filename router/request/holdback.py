"""Shares of the decode pools that less urgent requests leave free for more urgent ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import AfterValidator

from router.request.priorities import MAX_PRIORITY
from router.workers.worker import Worker
from runtime.config import accepted_by
from runtime.errors import ConfigError


@dataclass(frozen=True)
class Holdback:
    """Ceilings on the use of the pools, by priority.

    `ceilings` are (priority, share), the least urgent first. A request of a ceiling's priority or a
    larger one is placed only while a pool is used less than that. Of several ceilings the one of the
    least urgent priority applies, which is the lowest (`parse` checks it).
    """

    ceilings: tuple[tuple[int, float], ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """Parse "PRIORITY=SHARE" entries.

        Raises:
            ConfigError: an entry is malformed, or a less urgent priority has a higher ceiling.
        """
        ceilings = sorted(map(_parsed, entries), reverse=True)
        shares = [share for _, share in ceilings]
        if shares != sorted(shares):
            raise ConfigError(
                "holdback: a less urgent priority must not have a higher share", field="holdback"
            )
        return cls(tuple(ceilings))

    def is_held(self, priority: int, pools: Sequence[Worker]) -> bool:
        """Return whether a request waits because each pool is used up to its ceiling.

        A pool's use is that of its requests or of its pages, whichever is greater.
        """
        share = next((share for least, share in self.ceilings if priority >= least), None)
        return share is not None and all(pool.snapshot.candidate.load >= share for pool in pools)


NO_HOLDBACK = Holdback()


def _parsed(entry: str) -> tuple[int, float]:
    priority, _, share = entry.partition("=")
    try:
        found = int(priority), float(share)
    except ValueError:
        found = 0, 0.0
    if abs(found[0]) > MAX_PRIORITY or not 0 < found[1] <= 1:
        raise ConfigError(
            f"holdback must be PRIORITY=SHARE with a priority from {-MAX_PRIORITY} to {MAX_PRIORITY} "
            f"and a share above 0 and at most 1, got {entry!r}",
            field="holdback",
        )
    return found


HoldbackField = Annotated[str, AfterValidator(accepted_by(_parsed))]
