"""Pairs arriving messages with posted receives, for transports that see a message before they take
it."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from transfer.transport.protocol import Berth, Operation, Peer, tag_prefix
from transfer.transport.refusals import RefusalReason, Refusals

M = TypeVar("M")

MAX_PREFIXES = 65_536  # that are told apart from foreign ones


class MessageMatcher(Generic[M]):
    """Posted receives by tag. A message that no receive waits for is refused: receives are posted
    before their sender hears of their tags, so none of its messages can come too early. Whatever a
    method returns as messages is to be discarded by the transport.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._posted: dict[int, deque[Operation]] = {}
        self._starved: deque[tuple[Operation, M]] = (
            deque()
        )  # matched, but there is no memory for the message yet
        self._known: OrderedDict[int, bool] = (
            OrderedDict()
        )  # prefixes of tags: whether they are retired

    def post(self, operation: Operation) -> None:
        """Wait for a message."""
        self._posted.setdefault(operation.tag, deque()).append(operation)
        self._note(tag_prefix(operation.tag), is_retired=False)

    def arrive(self, tag: int, num_bytes: int, message: M) -> tuple[Operation | None, list[M]]:
        """Return the receive that takes this message, if one waits, and messages to discard."""
        waiting = self._posted.get(tag)
        if not waiting:
            self._refusals.add(self._reason(tag), f"{num_bytes} bytes under tag {tag:#018x}")
            return None, [message]
        operation = waiting.popleft()
        if not waiting:
            del self._posted[tag]
        return (operation if self._is_fed(operation, message) else None), []

    def fed(self) -> list[tuple[Operation, M]]:
        """Return receives for whose messages there is memory by now, first come, first served."""
        pairs = []
        while self._starved and self._starved[0][0].has_memory():
            pairs.append(self._starved.popleft())
        return pairs

    def cancel(self, operation: Operation) -> tuple[bool, list[M]]:
        """Drop a receive that still waits, for its message or for memory. Return whether it did,
        and messages to discard."""
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
        """Drop every waiting receive of this peer. Return them, and messages to discard."""
        lost = [operation for operation in self._waiting() if operation.peer is peer]
        discarded = list[M]()
        for operation in lost:
            discarded += self.cancel(operation)[1]
        return lost, discarded

    def retire(self, prefix: int) -> None:
        """Remember that an epoch of a session is over: its messages are late, not foreign."""
        self._note(prefix, is_retired=True)

    def clear(self) -> list[M]:
        """Drop everything, for closing. Return messages to discard."""
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
        """Whether there is memory for the message; else it waits behind those that wait already."""
        if isinstance(operation.buffer, Berth) and (self._starved or not operation.has_memory()):
            self._starved.append((operation, message))
            return False
        return True
