"""What a full prefix cache gives up first. Pure."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

NodeT = TypeVar("NodeT")

_SPARE_ENTRIES = 64


class EvictionOrder(Generic[NodeT]):
    """Nodes by their worth, least first.

    A node's worth may rise at any time: it is looked at again when its turn comes. Where it falls, `put` says so.
    """

    def __init__(self, worth: Callable[[NodeT], float]) -> None:
        self._worth = worth
        self._heap: list[tuple[float, int, NodeT]] = []
        self._latest: dict[NodeT, int] = {}  # which of a node's entries counts
        self._serial = count()

    def put(self, node: NodeT) -> None:
        """It may be given up from now on, for what it is worth now."""
        serial = self._latest[node] = next(self._serial)
        heapq.heappush(self._heap, (self._worth(node), serial, node))
        if len(self._heap) > 2 * len(self._latest) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._latest.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: NodeT) -> None:
        """It may not any more. Idempotent."""
        self._latest.pop(node, None)

    def take(self, may_go: Callable[[NodeT], bool]) -> NodeT | None:
        """Remove and return the one of least worth that may go; None if none may."""
        passed, found = [], None
        while self._heap and found is None:
            entry = worth, serial, node = heapq.heappop(self._heap)
            if self._latest.get(node) != serial:
                continue
            if self._worth(node) > worth:
                self.put(node)
            elif may_go(node):
                self.discard(node)
                found = node
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found
