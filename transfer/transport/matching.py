"""Matching of arriving messages with posted receives.

It is for transports that see a message before they accept it.
"""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from transfer.transport.protocol import Berth, Operation, Peer, tag_prefix
from transfer.transport.refusals import RefusalReason, Refusals

M = TypeVar("M")

MAX_PREFIXES = 65_536  # limit of prefixes that are distinguished from foreign ones


class MessageMatcher(Generic[M]):
    """Posted receives by tag.

    A message without a posted receive is rejected. Receives are posted before the sender learns
    their tags, so its messages cannot arrive too early. The transport must discard the messages
    that a method returns.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._posted: dict[int, deque[Operation]] = {}
        # Matched, but there is no memory for the message yet.
        self._starved: deque[tuple[Operation, M]] = deque()
        # By tag prefix: whether it is retired.
        self._known: OrderedDict[int, bool] = OrderedDict()

    def post(self, operation: Operation) -> None:
        """Wait for a message."""
        self._posted.setdefault(operation.tag, deque()).append(operation)
        self._note(tag_prefix(operation.tag), is_retired=False)

    def arrive(self, tag: int, num_bytes: int, message: M) -> tuple[Operation | None, list[M]]:
        """Return the receive of this message, if one is posted, and messages to discard."""
        waiting = self._posted.get(tag)
        if not waiting:
            self._refusals.add(self._reason(tag), f"{num_bytes} bytes under tag {tag:#018x}")
            return None, [message]
        operation = waiting.popleft()
        if not waiting:
            del self._posted[tag]
        return (operation if self._is_fed(operation, message) else None), []

    def fed(self) -> list[tuple[Operation, M]]:
        """Return receives for whose messages memory is now available, in order of arrival."""
        pairs = []
        while self._starved and self._starved[0][0].has_memory():
            pairs.append(self._starved.popleft())
        return pairs

    def cancel(self, operation: Operation) -> tuple[bool, list[M]]:
        """Cancel a receive that still waits for its message or for memory.

        Returns whether it did, and messages to discard.
        """
        for pair in self._starved:
            if pair[0] is operation:
                self._starved.remove(pair)
                return True, [pair[1]]
        waiting = self._posted.get(operation.tag)
        if waiting is None or operation not in waiting:
            return False, []
        waiting.remove(operation)
        if not waiting:
            del self._posted[operation.tag]
        return True, []

    def cancel_peer(self, peer: Peer) -> tuple[list[Operation], list[M]]:
        """Cancel every waiting receive of this peer; return them, and messages to discard."""
        lost = [operation for operation in self._waiting() if operation.peer is peer]
        discarded = list[M]()
        for operation in lost:
            discarded += self.cancel(operation)[1]
        return lost, discarded

    def retire(self, prefix: int) -> None:
        """Mark the epoch of a session as over: its messages are late, not foreign."""
        self._note(prefix, is_retired=True)

    def clear(self) -> list[M]:
        """Drop all receives before closing; return messages to discard."""
        starving = [message for _, message in self._starved]
        self._posted.clear()
        self._starved.clear()
        return starving

    def _reason(self, tag: int) -> RefusalReason:
        is_retired = self._known.get(tag_prefix(tag))
        if is_retired is None:
            return RefusalReason.FOREIGN
        return RefusalReason.LATE if is_retired else RefusalReason.REPEATED

    def _note(self, prefix: int, *, is_retired: bool) -> None:
        self._known[prefix] = is_retired
        self._known.move_to_end(prefix)
        if len(self._known) > MAX_PREFIXES:
            self._known.popitem(last=False)

    def _waiting(self) -> list[Operation]:
        posted = [operation for waiting in self._posted.values() for operation in waiting]
        return [*posted, *(operation for operation, _ in self._starved)]

    def _is_fed(self, operation: Operation, message: M) -> bool:
        """Return whether memory for the message is available; otherwise queue it."""
        if isinstance(operation.buffer, Berth) and (self._starved or not operation.has_memory()):
            self._starved.append((operation, message))
            return False
        return True
