"""Pairs arriving messages with posted receives, for transports that see a message before they take it."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from runtime.clock import Clock
from transfer.transport import Operation, Peer, tag_prefix

M = TypeVar("M")

MAX_RETIRED_PREFIXES = 65_536
MAX_HELD_MESSAGES = 4_096
HOLD_S = 30.0


class Matcher(Generic[M]):
    """Posted receives by tag, messages nobody waits for yet, and prefixes whose messages are thrown away.

    A message that comes before its receive is held for at most `HOLD_S` seconds and with at most `MAX_HELD_MESSAGES`
    others, so a peer that sends garbage costs bounded memory. Whatever a method returns as messages is to be discarded
    by the transport.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._posted: dict[int, deque[Operation]] = {}
        self._held: OrderedDict[int, tuple[int, float, M]] = OrderedDict()  # by arrival
        self._arrivals = 0
        self._retired: OrderedDict[int, None] = OrderedDict()
        self.num_discarded = 0

    def post(self, operation: Operation) -> M | None:
        """Wait for a message, or take the oldest one that is held for this tag."""
        if self._held:
            for arrival, (tag, _, message) in self._held.items():
                if tag == operation.tag:
                    del self._held[arrival]
                    return message
        self._posted.setdefault(operation.tag, deque()).append(operation)
        return None

    def arrive(self, tag: int, message: M) -> tuple[Operation | None, list[M]]:
        """The receive that takes this message, if one waits, and messages to discard."""
        waiting = self._posted.get(tag)
        if waiting:
            operation = waiting.popleft()
            if not waiting:
                del self._posted[tag]
            return operation, []
        if tag_prefix(tag) in self._retired:
            self.num_discarded += 1
            return None, [message]
        self._held[self._arrivals] = (tag, self._clock.now() + HOLD_S, message)
        self._arrivals += 1
        discarded = [self._held.popitem(last=False)[1][2]] if len(self._held) > MAX_HELD_MESSAGES else []
        self.num_discarded += len(discarded)
        return None, discarded

    def cancel(self, operation: Operation) -> bool:
        """True if the receive was still waiting; it is forgotten."""
        waiting = self._posted.get(operation.tag)
        if waiting is None or operation not in waiting:
            return False
        waiting.remove(operation)
        if not waiting:
            del self._posted[operation.tag]
        return True

    def cancel_peer(self, peer: Peer) -> list[Operation]:
        """Forget every waiting receive of this peer and return them."""
        lost = [operation for waiting in self._posted.values() for operation in waiting if operation.peer is peer]
        for operation in lost:
            self.cancel(operation)
        return lost

    def retire(self, prefix: int) -> list[M]:
        """Discard what is held for this prefix, now and later."""
        self._retired[prefix] = None
        self._retired.move_to_end(prefix)
        if len(self._retired) > MAX_RETIRED_PREFIXES:
            self._retired.popitem(last=False)
        return self._take_held([arrival for arrival, (tag, _, _) in self._held.items() if tag_prefix(tag) == prefix])

    def expire(self) -> list[M]:
        """Messages that were held too long."""
        if not self._held:
            return []
        now = self._clock.now()
        return self._take_held([arrival for arrival, (_, until, _) in self._held.items() if until <= now])

    def clear(self) -> tuple[list[Operation], list[M]]:
        """Forget everything; for closing."""
        operations = [operation for waiting in self._posted.values() for operation in waiting]
        self._posted.clear()
        return operations, self._take_held(list(self._held))

    def _take_held(self, arrivals: list[int]) -> list[M]:
        messages = [self._held.pop(arrival)[2] for arrival in arrivals]
        self.num_discarded += len(messages)
        return messages
