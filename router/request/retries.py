"""What becomes of a request whose worker failed: whether another one could do better, the search
for it, and, where a pool gives the whole request up, the move to another pair."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from router.request.worker_stream import FlowLimits
from router.workers.directory import Directory, WorkerPair
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import Booking, Worker
from runtime.errors import (
    BatonError,
    DeadlineError,
    DrainingError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
    RequestAborted,
    StalledError,
    UnavailableError,
)
from runtime.observe.metrics import RouterMetrics

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.05


def lost(worker: Worker, reason: str) -> PeerLostError:
    """For the client, who has no use for addresses of this cluster's inside; the log has them."""
    logger.info("stream lost", extra={"worker": worker.address, "reason": reason})
    return PeerLostError(f"the {worker.role} worker was lost")


def may_retry(error: BatonError) -> bool:
    """Whether another worker could do better: not with a request that is wrong, a bug, or no time
    left."""
    return not isinstance(error, InvalidRequestError | InternalError | DeadlineError)


async def search(
    directory: Directory, attempt: Callable[[], Booking | None], wait_s: float, error: BatonError
) -> Booking:
    """A booking within `wait_s`, or the error that made it necessary."""
    try:
        async with asyncio.timeout(wait_s):
            return await directory.until(attempt)
    except TimeoutError:
        raise error from None


def suspect(booking: Booking, error: BatonError) -> None:
    """A worker whose stream broke gets nothing more until it reports again; one that was late for a
    request may."""
    if isinstance(error, UnavailableError) and not isinstance(error, StalledError):
        booking.lost(str(error))


class MoveReason(StrEnum):
    """Why a pool gave a request up, as metrics name it."""

    LOST = "lost"
    DRAINED = "drained"
    HELD_UP = "held_up"


def _move_reason(error: BatonError) -> MoveReason:
    if isinstance(error, DrainingError):
        return MoveReason.DRAINED
    return MoveReason.HELD_UP if isinstance(error, StalledError) else MoveReason.LOST


@dataclass
class Migrations:
    """The moves of one request to other pairs of workers: when it may go on there, and with which.

    The new pair runs the prompt again, and the new pool computes the tokens that the client has
    already without drawing them. Draws are keyed by seed and position, so what follows is what
    would have followed. A pair must serve the same weights in the same way: its compatibility
    digest fits that of the lost pool.

    A request that loses pool after pool may be what kills them, or holds them up, so losses are
    bounded; pools that drain hand requests back on purpose, and do not count. `under_way`: why it
    moves at present, until it has resumed or ended.
    """

    directory: Directory
    limits: FlowLimits
    metrics: RouterMetrics
    num_lost: int = 0
    under_way: MoveReason | None = None

    async def another_pair(
        self, lost: Booking, error: BatonError, prompt: RoutedPrompt, context_tokens: int = 0
    ) -> WorkerPair:
        """A pair in place of the one whose pool is gone, rather not with the same pool.

        Raises:
            BatonError: no other pair could do better, or no pair came up in time; PeerLostError if
                the pool is gone.
        """
        self.ended()
        if not isinstance(error, UnavailableError | RequestAborted):
            raise error
        self.under_way = _move_reason(error)
        self.num_lost += self.under_way is not MoveReason.DRAINED
        if self.under_way is not MoveReason.HELD_UP:
            lost.lost(str(error))  # it gets nothing until it reports again
        pair = None
        if self.num_lost <= self.limits.migrations:
            await asyncio.sleep(RETRY_PAUSE_S)
            pair = await self._search(lost, prompt, context_tokens)
        if pair is None:
            raise PeerLostError(str(error))
        return pair

    def resumed(self) -> None:
        """The new pool has everything it needs."""
        self._count("resumed")

    def ended(self) -> None:
        """The request is over, or moves once more. Idempotent."""
        self._count("failed")

    def _count(self, outcome: str) -> None:
        if self.under_way is not None:
            self.metrics.migrations.labels(self.under_way.value, outcome).inc()
        self.under_way = None

    async def _search(
        self, lost: Booking, prompt: RoutedPrompt, context_tokens: int
    ) -> WorkerPair | None:
        """Longer while there is a pair that is only full."""
        loop, compatibility = asyncio.get_running_loop(), lost.compatibility
        began = loop.time()
        while True:
            pair = self.directory.place_again(
                prompt, compatibility, lost.worker.address, context_tokens
            )
            if pair is not None:
                return pair
            is_full = self.directory.has_pair(compatibility, context_tokens)
            patience_s = (
                self.limits.capacity_wait_s
                if is_full
                else self.limits.restart_estimate_s(self.directory)
            )
            if loop.time() >= began + patience_s:
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + patience_s):
                    await self.directory.changed()
