"""A client with several routers: a request that one of them cannot finish is sent again to the next.

The answer of one request is the same bits wherever it is drawn, so what a second router sends again of it is compared
with what came before, and only the rest is passed on.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from baton.values import Chunk, Event, Query
from runtime.errors import BatonError, CapacityError, DeadlineError, HandoffError, IntegrityError, UnavailableError

SUSPECT_S = 4.0  # how long a router that broke off is asked last
PAUSE_S = 0.1
MIN_LEFT_S = 0.05


class Asker(Protocol):
    """Whom a storm's requests are sent through."""

    def generate(self, query: Query, *, timeout_s: float) -> AsyncGenerator[Event, None]: ...


class WrongReplay(BatonError):
    """What came again is not what came before."""

    reason = "WRONG_REPLAY"


class SeveralRouters:
    """Satisfies `Asker`. Every request starts at the next router in turn."""

    def __init__(self, clients: Sequence[Asker]) -> None:
        self._clients = clients
        self._turn = 0
        self._suspect_until_s = [0.0] * len(clients)

    async def generate(self, query: Query, *, timeout_s: float) -> AsyncGenerator[Event, None]:
        """Raises BatonError of the last try, when time is up or no try can help."""
        now = asyncio.get_running_loop().time
        deadline_s, tokens, tries = now() + timeout_s, list[int](), 0
        while True:
            index = self._next()
            try:
                async with aclosing(self._clients[index].generate(
                        replace(query, request_id=f"{query.request_id}.{tries}"),
                        timeout_s=max(deadline_s - now(), MIN_LEFT_S))) as events:
                    position = 0
                    async for event in events:
                        if isinstance(event, Chunk):
                            event, position = _unseen(event, position, tokens), position + len(event.token_ids)
                            if not event.token_ids:
                                continue
                            tokens += event.token_ids
                        yield event
                return
            except BatonError as error:
                pause_s = error.retry_after_s or PAUSE_S
                if not _may_help(error) or now() + pause_s + MIN_LEFT_S > deadline_s:
                    raise
                self._suspect_until_s[index] = now() + SUSPECT_S
            tries += 1
            if tries % len(self._clients) == 0:
                await asyncio.sleep(min(pause_s, 1.0))

    def _next(self) -> int:
        """The next in turn, but one that is not suspect if there is any."""
        now = asyncio.get_running_loop().time()
        order = [(self._turn + step) % len(self._clients) for step in range(len(self._clients))]
        self._turn += 1
        return min(order, key=lambda index: self._suspect_until_s[index] > now)


def _may_help(error: BatonError) -> bool:
    return isinstance(error, UnavailableError | CapacityError | HandoffError) and not isinstance(
        error, IntegrityError | DeadlineError)


def _unseen(chunk: Chunk, position: int, seen: Sequence[int]) -> Chunk:
    """What of a chunk at this position is new. Raises WrongReplay when the rest is something else than `seen`."""
    again = min(max(len(seen) - position, 0), len(chunk.token_ids))
    if list(chunk.token_ids[:again]) != list(seen[position:position + again]):
        raise WrongReplay(f"tokens {position} to {position + again} came again as {chunk.token_ids[:again]}")
    return replace(chunk, token_ids=chunk.token_ids[again:], logprobs=chunk.logprobs[again:])
