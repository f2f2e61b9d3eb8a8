"""Fair queueing at the grammar compiler: a client with many new grammars delays only itself.

    async with Turns(4, 32).taken("client"): ...compile...     clients in turn, each with at most half of the places
    await Allowances(8.0).take("client")                       a burst, then a rate of new grammars per second

The empty name is for callers that are not distinguished, such as routers on a worker. It has no
share limit. Belongs to an event loop.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from runtime.errors import CapacityError

WAIT_S = 10.0  # longest wait for a turn
BURST = 32  # new grammars of a client at once
MAX_CLIENTS = 1024  # clients with a used allowance
RESOURCE = "grammar compiler"


class Turns:
    """Compilations of one kind, with a limit of concurrent and of queued ones."""

    def __init__(self, at_once: int, max_waiting: int) -> None:
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._running: Counter[str] = Counter()
        # In order of their next turn.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """Hold a turn during the block.

        Raises CapacityError if too many wait, in total or of this client, or the turn came too
        late.
        """
        await self._take(client)
        try:
            yield
        finally:
            self._release(client)

    async def _take(self, client: str) -> None:
        if self._may_run(client) and not self._waiting:
            self._running[client] += 1
            return
        own = len(self._waiting.get(client, ()))
        if client and own >= max(1, self._max_waiting // 4):
            raise CapacityError(
                f"{own} grammars of this client wait to be compiled, which is the limit",
                resource=RESOURCE,
            )
        if (count := self.num_waiting) >= self._max_waiting:
            raise CapacityError(
                f"{count} grammars wait to be compiled, which is the limit", resource=RESOURCE
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._give_turns()
        try:
            async with asyncio.timeout(WAIT_S):
                await turn
        except BaseException as error:
            self._leave(client, turn)
            if not isinstance(error, TimeoutError):
                raise
            raise CapacityError(
                f"other grammars kept the compiler busy for {WAIT_S:g} s, the limit of waiting",
                resource=RESOURCE,
            ) from None

    def _leave(self, client: str, turn: "asyncio.Future[None]") -> None:
        if turn.done() and not turn.cancelled():  # the turn came just before the timeout
            self._release(client)
        elif client in self._waiting and turn in self._waiting[client]:
            self._waiting[client].remove(turn)
            if not self._waiting[client]:
                del self._waiting[client]

    def _release(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._give_turns()

    def _may_run(self, client: str) -> bool:
        share = max(1, self._at_once // 2) if client else self._at_once
        return self._running.total() < self._at_once and self._running[client] < share

    def _give_turns(self) -> None:
        for client in tuple(self._waiting):
            if not self._may_run(client):
                continue
            turn = self._waiting[client].popleft()
            self._waiting.move_to_end(client)
            if not self._waiting[client]:
                del self._waiting[client]
            if not turn.done():
                self._running[client] += 1
                turn.set_result(None)


class Allowances:
    """Rate limit of new grammars per client: `BURST` at once, and `per_s`."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        # (grammars, time of that count)
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def take(self, client: str) -> None:
        """Wait until the client may add one grammar.

        Raises CapacityError if that takes longer than `WAIT_S`.
        """
        if not client:
            return
        now_s = time.monotonic()
        used, at_s = self._used.pop(client, (0.0, now_s))
        used = max(0.0, used - (now_s - at_s) * self._per_s)
        wait_s = max(0.0, (used + 1 - BURST) / self._per_s)
        if wait_s > WAIT_S:
            self._used[client] = used, now_s
            raise CapacityError(
                f"a client may bring {BURST} new grammars at once and {self._per_s:g} more a second",
                resource=RESOURCE,
                retry_after_s=wait_s - WAIT_S + 1 / self._per_s,
            )
        self._used[client] = used + 1, now_s
        if len(self._used) > MAX_CLIENTS:
            self._used.popitem(last=False)
        if wait_s:
            await asyncio.sleep(wait_s)
