"""Bounds on the priority that a client may request."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import AfterValidator

from runtime.config import accepted_by
from runtime.errors import ConfigError
from runtime.security.access import Caller

MAX_PRIORITY = 100
EVERYBODY = "*"
DEFAULT_LIMITS = ("*=0",)


@dataclass(frozen=True)
class PriorityLimits:
    """Most urgent priority of each client, by the name in its token or certificate.

    `lowest` maps a name to its smallest priority; the smaller a priority, the more urgent. `*`
    applies to clients without an entry.
    """

    lowest: Mapping[str, int] = field(default_factory=lambda: {EVERYBODY: 0})

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """Parse "NAME=PRIORITY" entries.

        Raises:
            ConfigError: an entry is malformed; the error names it.
        """
        return cls({EVERYBODY: 0} | dict(map(_parsed, entries)))

    def most_urgent(self, caller: Caller) -> int:
        """Return the smallest priority that `caller` may use."""
        own = [self.lowest[name] for name in caller.names if name in self.lowest]
        return min(own, default=self.lowest[EVERYBODY])


def _parsed(entry: str) -> tuple[str, int]:
    name, equals, text = entry.rpartition("=")
    try:
        priority = int(text)
    except ValueError:
        equals = ""
        priority = 0
    if not equals or not name or abs(priority) > MAX_PRIORITY:
        raise ConfigError(
            f"priority_limits must be NAME=PRIORITY with a priority from {-MAX_PRIORITY} to "
            f"{MAX_PRIORITY}, got {entry!r}",
            field="priority_limits",
        )
    return name, priority


PriorityLimitField = Annotated[str, AfterValidator(accepted_by(_parsed))]
