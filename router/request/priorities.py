"""Who may push ahead: the most urgent priority of each client, by the name its token or certificate gives it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import AfterValidator

from router.request.validate import MAX_PRIORITY
from runtime.access import Caller
from runtime.errors import ConfigError

EVERYBODY = "*"
DEFAULT_LIMITS = ("*=0",)


@dataclass(frozen=True)
class PriorityLimits:
    """`lowest` by name; the smaller a priority, the more urgent. `*` is for whoever has no entry of its own."""

    lowest: Mapping[str, int] = field(default_factory=lambda: {EVERYBODY: 0})

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """From "NAME=PRIORITY". Raises ConfigError naming an entry that is none."""
        return cls({EVERYBODY: 0} | dict(map(_parsed, entries)))

    def most_urgent(self, caller: Caller) -> int:
        """The smallest priority `caller` may give a request."""
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
        raise ConfigError(f"priority_limits must be NAME=PRIORITY with a priority from {-MAX_PRIORITY} to "
                          f"{MAX_PRIORITY}, got {entry!r}", field="priority_limits")
    return name, priority


def _checked(entry: str) -> str:
    try:
        _parsed(entry)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return entry


PriorityLimitField = Annotated[str, AfterValidator(_checked)]
