"""Pairs arriving messages with posted receives, for transports that see a message before they take it."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from runtime.clock import Clock
from transfer.transport.protocol import Berth, Operation, Peer, tag_prefix

M = TypeVar("M")

MAX_RETIRED_PREFIXES = 65_536
MAX_HELD_MESSAGES = 4_096
HOLD_S = 30.0


class MessageMatcher(Generic[M]):
    """Posted receives by tag, messages that no receive waits for yet, and prefixes whose messages are thrown away.

    A message that comes before its receive is held for at most `HOLD_S` seconds and with at most `MAX_HELD_MESSAGES`
    others, so a peer that sends garbage costs bounded memory. Whatever a method returns as messages is to be discarded
    by the transport.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._posted: dict[int, deque[Operation]] = {}
        self._starved: deque[tuple[Operation, M]] = deque()  # matched, but there is no memory for the message yet
        self._held: OrderedDict[int, tuple[int, float, M]] = OrderedDict()  # by arrival
        self._arrivals = 0
        self._retired: OrderedDict[int, None] = OrderedDict()
        self.num_discarded = 0

    def post(self, operation: Operation) -> M | None:
        """Wait for a message (or for memory), or take the oldest one that is held for this tag."""
        if self._held:
            for arrival, (tag, _, message) in self._held.items():
                if tag == operation.tag:
                    del self._held[arrival]
                    return message if self._is_fed(operation, message) else None
        self._posted.setdefault(operation.tag, deque()).append(operation)
        return None

    def arrive(self, tag: int, message: M) -> tuple[Operation | None, list[M]]:
        """The receive that takes this message, if one waits, and messages to discard."""
        waiting = self._posted.get(tag)
        if waiting:
            operation = waiting.popleft()
            if not waiting:
                del self._posted[tag]
            return (operation if self._is_fed(operation, message) else None), []
        if tag_prefix(tag) in self._retired:
            self.num_discarded += 1
            return None, [message]
        self._hold(tag, message)
        discarded = [self._held.popitem(last=False)[1][2]] if len(self._held) > MAX_HELD_MESSAGES else []
        self.num_discarded += len(discarded)
        return None, discarded

    def fed(self) -> list[tuple[Operation, M]]:
        """Receives for whose messages there is memory by now, first come, first served."""
        pairs = []
        while self._starved and self._starved[0][0].has_memory():
            pairs.append(self._starved.popleft())
        return pairs

    def cancel(self, operation: Operation) -> bool:
        """True if the receive was still waiting, for its message or for memory; it is dropped."""
        for pair in self._starved:
            if pair[0] is operation:
                self._starved.remove(pair)
                self._hold(operation.tag, pair[1])  # as if it had come before its receive
                return True
        waiting = self._posted.get(operation.tag)
        if waiting is None or operation not in waiting:
            return False
        waiting.remove(operation)
        if not waiting:
            del self._posted[operation.tag]
        return True

    def cancel_peer(self, peer: Peer) -> list[Operation]:
        """Drop every waiting receive of this peer and return them."""
        lost = [operation for operation in self._waiting() if operation.peer is peer]
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
        """Drop everything; for closing."""
        operations, starving = self._waiting(), [message for _, message in self._starved]
        self._posted.clear()
        self._starved.clear()
        return operations, [*starving, *self._take_held(list(self._held))]

    def _waiting(self) -> list[Operation]:
        posted = [operation for waiting in self._posted.values() for operation in waiting]
        return [*posted, *(operation for operation, _ in self._starved)]

    def _is_fed(self, operation: Operation, message: M) -> bool:
        """Whether there is memory for the message; else it waits behind those that wait already."""
        if isinstance(operation.buffer, Berth) and (self._starved or not operation.has_memory()):
            self._starved.append((operation, message))
            return False
        return True

    def _hold(self, tag: int, message: M) -> None:
        self._held[self._arrivals] = (tag, self._clock.now() + HOLD_S, message)
        self._arrivals += 1

    def _take_held(self, arrivals: list[int]) -> list[M]:
        messages = [self._held.pop(arrival)[2] for arrival in arrivals]
        self.num_discarded += len(messages)
        return messages
