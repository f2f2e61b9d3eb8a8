"""Limit on prompts with logprobs per client.

The scores of a long prompt are kept at its prefill worker until the client has read them, and
occupy the prompt's memory there. So one client gets only a share of the prefill places for such
prompts; further ones wait for its own places.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from runtime.errors import CapacityError

SHARE = 4  # a client gets one place in four, and at least one


class ScoringPlaces:
    """Places for prompts with logprobs. Belongs to an event loop."""

    def __init__(self, num_places: Callable[[], int], max_wait_s: float) -> None:
        """`num_places`: number of prompts for which the prefill workers together have memory."""
        self._num_places = num_places
        self._max_wait_s = max_wait_s
        self._taken: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """Hold a place for `client` until the block ends.

        Raises:
            CapacityError: the client's own requests have occupied its places for too long.
        """
        if self._taken[client] < self._share and client not in self._waiting:
            self._taken[client] += 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._leave(client)

    @property
    def _share(self) -> int:
        return max(1, self._num_places() // SHARE)

    async def _wait(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave(client)
            else:
                self._forget(client, turn)
            if not isinstance(error, TimeoutError):
                raise
            raise CapacityError(
                f"{self._share} prompts with logprobs of this client are in progress, which is the limit",
                resource="prompt logprobs",
            ) from None

    def _leave(self, client: str) -> None:
        """Pass the place to the client's next request, unless the number of places has fallen."""
        self._taken[client] -= 1
        while client in self._waiting and self._taken[client] < self._share:
            turn = self._waiting[client][0]
            self._forget(client, turn)
            if not turn.done():
                self._taken[client] += 1
                turn.set_result(None)
        if not self._taken[client]:
            del self._taken[client]

    def _forget(self, client: str, turn: "asyncio.Future[None]") -> None:
        self._waiting[client].remove(turn)
        if not self._waiting[client]:
            del self._waiting[client]
