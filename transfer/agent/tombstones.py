"""What is over and must not come back."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

IdT = TypeVar("IdT", bound=Hashable)


class Tombstones(Generic[IdT]):
    """Ids of what is over, so that whatever is late about them is told from what is new. Bounded: the oldest are
    forgotten."""

    def __init__(self, max_entries: int = 65_536) -> None:
        self._max_entries = max_entries
        self._ids: OrderedDict[IdT, None] = OrderedDict()

    def add(self, ended: IdT) -> None:
        self._ids[ended] = None
        self._ids.move_to_end(ended)
        if len(self._ids) > self._max_entries:
            self._ids.popitem(last=False)

    def clear(self) -> None:
        self._ids.clear()

    def __contains__(self, candidate: object) -> bool:
        return candidate in self._ids

    def __len__(self) -> int:
        return len(self._ids)
