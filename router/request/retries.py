"""Retry policy of a request whose worker failed.

Decides whether another worker could help, searches for one, and moves the request to another pair
when its decode pool gives it up.
"""

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
from runtime.clock import Deadline, LoopClock
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
    """Log the loss of a worker; return an error for the client, without addresses."""
    logger.info("stream lost", extra={"worker": worker.address, "reason": reason})
    return PeerLostError(f"the {worker.role} worker was lost")


def may_retry(error: BatonError) -> bool:
    """Return whether another worker could help: not for an invalid request, a bug or a timeout."""
    return not isinstance(error, InvalidRequestError | InternalError | DeadlineError)


async def search(
    directory: Directory,
    attempt: Callable[[], Booking | None],
    timeout_s: float,
    error: BatonError,
) -> Booking:
    """Return a booking within `timeout_s` seconds.

    Raises:
        BatonError: `error`, which made the search necessary, if `attempt` found no worker in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await directory.until(attempt)
    except TimeoutError:
        raise error from None


def suspect(booking: Booking, error: BatonError) -> None:
    """Stop using a worker whose stream broke until it reports again. A worker that was only late
    stays in use.
    """
    if isinstance(error, UnavailableError) and not isinstance(error, StalledError):
        booking.lost(str(error))


class MoveReason(StrEnum):
    """Reason why a pool gave a request up; a metric label."""

    LOST = "lost"
    DRAINED = "drained"
    STALLED = "held_up"  # the metric keeps its label


def _move_reason(error: BatonError) -> MoveReason:
    if isinstance(error, DrainingError):
        return MoveReason.DRAINED
    return MoveReason.STALLED if isinstance(error, StalledError) else MoveReason.LOST


@dataclass
class Migrations:
    """Moves of one request to other pairs of workers: whether it may continue there, and on which.

    The new pair prefills the prompt again, and the new pool computes the tokens that the client
    already has without sampling them. Sampling is keyed by seed and position, so the continuation
    is the same. A pair must serve the same weights with the same numerics: its compatibility digest
    fits the lost pool's.

    A request that loses pool after pool may itself kill or stall them, so losses are bounded.
    Pools that drain hand requests back on purpose and do not count. `under_way` is the reason of
    the current move, until the request has resumed or ended.
    """

    directory: Directory
    limits: FlowLimits
    metrics: RouterMetrics
    num_lost: int = 0
    under_way: MoveReason | None = None

    async def another_pair(
        self, lost: Booking, error: BatonError, prompt: RoutedPrompt, context_tokens: int = 0
    ) -> WorkerPair:
        """Return a pair in place of the one whose pool is lost, with another pool if possible.

        Raises:
            BatonError: no other pair could help, or none was available in time; PeerLostError if
                the pool is lost.
        """
        self.ended()
        if not isinstance(error, UnavailableError | RequestAborted):
            raise error
        self.under_way = _move_reason(error)
        self.num_lost += self.under_way is not MoveReason.DRAINED
        if self.under_way is not MoveReason.STALLED:
            lost.lost(str(error))  # not used until it reports again
        pair = None
        if self.num_lost <= self.limits.migrations:
            await asyncio.sleep(RETRY_PAUSE_S)
            pair = await self._search(lost, prompt, context_tokens)
        if pair is None:
            raise PeerLostError(str(error))
        return pair

    def resumed(self) -> None:
        """Count a successful move: the new pool has everything it needs."""
        self._count("resumed")

    def ended(self) -> None:
        """Count a failed move if one is under way: the request ended or moves again. Idempotent."""
        self._count("failed")

    def _count(self, outcome: str) -> None:
        if self.under_way is not None:
            self.metrics.migrations.labels(self.under_way.value, outcome).inc()
        self.under_way = None

    async def _search(
        self, lost: Booking, prompt: RoutedPrompt, context_tokens: int
    ) -> WorkerPair | None:
        """Search for a pair; wait longer while a compatible pair exists and is only full."""
        clock = LoopClock()
        compatibility = lost.compatibility
        began_s = clock.now()
        while True:
            pair = self.directory.place_again(
                prompt, compatibility, lost.worker.address, context_tokens
            )
            if pair is not None:
                return pair
            is_full = self.directory.has_pair(compatibility, context_tokens)
            timeout_s = (
                self.limits.capacity_wait_s
                if is_full
                else self.limits.restart_estimate_s(self.directory)
            )
            deadline = Deadline(clock, began_s + timeout_s)
            if deadline.is_over:
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline.remaining_s()):
                    await self.directory.changed()
