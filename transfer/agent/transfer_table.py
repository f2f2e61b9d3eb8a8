"""Transfers of one stage by session: opens, replaces, closes and drains them, and reports events."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from runtime.clock import Clock, Deadline
from runtime.errors import BatonError
from transfer.agent.stage_transfer import StageTransfer
from transfer.plan.handoff_terms import StageSessionEvent, StageSessionState
from transfer.transport.protocol import Operation, Peer, Transport

logger = logging.getLogger(__name__)


@dataclass
class _Closing:
    """Closed transfer with pending operations. Its connections are cut at the deadline."""

    transfer: StageTransfer
    closed_at_s: float
    deadline: Deadline


class TransferTable:
    """Table of transfers. Belongs to the agent's thread; other threads may read the counters."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        on_event: Callable[[StageSessionEvent], None],
        *,
        drain_s: float,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._on_event = on_event
        self._drain_s = drain_s
        self._open: dict[str, StageTransfer] = {}
        # Newer epochs that wait for the drain of the older one.
        self._next: dict[str, StageTransfer] = {}
        self._closing: list[_Closing] = []
        self._owners: dict[Operation, StageTransfer] = {}
        self._drains: list[Future[None]] = []  # pending futures of `close_all`
        self.num_bytes_sent = 0
        self.num_bytes_received = 0

    @property
    def num_open(self) -> int:
        return len(self._open) + len(self._next)

    @property
    def num_draining(self) -> int:
        return len(self._closing)

    @property
    def num_unfinished(self) -> int:
        """Return the number of transfers that have not reported DRAINED."""
        return self.num_open + self.num_draining

    def open(self, transfer: StageTransfer) -> None:
        """Start a transfer, which replaces an older epoch of its session.

        A stale or repeated epoch is rejected.
        """
        current = self._next.get(transfer.session_id) or self._open.get(transfer.session_id)
        if current is not None and current.epoch >= transfer.epoch:
            logger.warning(
                "session %s: epoch %d ignored, epoch %d is open",
                transfer.session_id,
                transfer.epoch,
                current.epoch,
            )
            return
        if current is not None:
            self.close(transfer.session_id)
        if transfer.writes_memory and any(
            self._conflicts(closing.transfer, transfer) for closing in self._closing
        ):
            self._next[transfer.session_id] = transfer
        else:
            self._start(transfer)

    def close(self, session_id: str) -> None:
        """Stop the session's transfers; each reports DRAINED when its operations have ended."""
        now = self._clock.now()
        deadline = Deadline.after(self._clock, self._drain_s)
        for transfer in (self._open.pop(session_id, None), self._next.pop(session_id, None)):
            if transfer is not None:
                transfer.stop()
                self._closing.append(_Closing(transfer, now, deadline))

    def close_transfer(self, transfer: StageTransfer) -> None:
        """Close this transfer, unless a newer epoch has replaced it."""
        if self._open.get(transfer.session_id) is transfer:
            self.close(transfer.session_id)

    def fail(self, transfer: StageTransfer, error: BatonError) -> None:
        """Fail a transfer for an external reason, and report it."""
        transfer.fail(error)
        self._report_change(transfer)

    def close_all(self, drained: Future[None]) -> None:
        """Close every session; `drained` is done when no transfer is left."""
        self._drains.append(drained)
        for session_id in [*self._open, *self._next]:
            self.close(session_id)

    def started(self, transfer: StageTransfer, operation: Operation) -> None:
        """Register an operation that the transfer has started."""
        self._owners[operation] = transfer

    def ended(self, operation: Operation) -> None:
        """Pass an ended operation to its transfer, and report the outcome."""
        transfer = self._owners.pop(operation)
        try:
            transfer.on_operation(operation)
        except BatonError as error:
            transfer.fail(error)
        self._report_change(transfer)

    def sweep(self, idle_s: float) -> float:
        """Report drains and cut overdue connections.

        Returns the seconds until the next sweep is needed, at most `idle_s`.
        """
        if not self._closing:
            self._settle()
            return idle_s
        drained = [
            closing.transfer for closing in self._closing if self._is_drained(closing.transfer)
        ]
        self._closing = [closing for closing in self._closing if closing.transfer not in drained]
        for transfer in drained:
            self._report(transfer, StageSessionState.DRAINED)
            waiting = self._next.get(transfer.session_id)
            if waiting is not None and not any(
                self._conflicts(closing.transfer, waiting) for closing in self._closing
            ):
                self._start(self._next.pop(transfer.session_id))
        self._settle()
        busy = [closing for closing in self._closing if closing.transfer.num_outstanding]
        for closing in busy:
            if closing.deadline.is_over:
                logger.warning(
                    "session %s epoch %d: %d operations have not ended %.1f s after the close, cutting "
                    "their connections",
                    closing.transfer.session_id,
                    closing.transfer.epoch,
                    closing.transfer.num_outstanding,
                    self._clock.now() - closing.closed_at_s,
                )
                self._cut(operation.peer for operation in closing.transfer.outstanding)
                closing.deadline = Deadline.after(self._clock, self._drain_s)
        return min([idle_s, *(closing.deadline.remaining_s() for closing in busy)])

    def fail_all(self, error: BatonError) -> None:
        """Fail all transfers, because the stage can no longer serve."""
        for transfer in [*self._open.values(), *self._next.values()]:
            self.fail(transfer, error)

    def transport_closed(self) -> None:
        """Report DRAINED for all transfers: without the transport no memory can be accessed."""
        transfers = [
            *self._open.values(),
            *self._next.values(),
            *(closing.transfer for closing in self._closing),
        ]
        self._open.clear()
        self._next.clear()
        self._closing.clear()
        self._owners.clear()
        for transfer in transfers:
            self._report(transfer, StageSessionState.DRAINED)
        self._settle()

    def _settle(self) -> None:
        while self._drains and not self.num_unfinished:
            self._drains.pop().set_result(None)

    def _start(self, transfer: StageTransfer) -> None:
        self._open[transfer.session_id] = transfer
        try:
            transfer.start()
            self._report(transfer, StageSessionState.OPEN)
        except BatonError as error:
            transfer.fail(error)
        for operation in transfer.outstanding:
            self.started(transfer, operation)
        self._report_change(transfer)

    def _cut(self, peers: Iterable[Peer]) -> None:
        for peer in set(peers):
            self._transport.close_peer(peer)

    def _is_drained(self, transfer: StageTransfer) -> bool:
        """Return whether the transfer and all older epochs of its session have drained.

        This also holds for a transfer that never started, because the last report represents the
        session.
        """
        return transfer.num_outstanding == 0 and not any(
            closing.transfer.num_outstanding
            and closing.transfer.epoch < transfer.epoch
            and self._conflicts(closing.transfer, transfer)
            for closing in self._closing
        )

    @staticmethod
    def _conflicts(older: StageTransfer, newer: StageTransfer) -> bool:
        return older.writes_memory and older.session_id == newer.session_id

    def _report_change(self, transfer: StageTransfer) -> None:
        if transfer.state is not StageSessionState.OPEN and not transfer.is_outcome_reported:
            transfer.is_outcome_reported = True
            if transfer.state is StageSessionState.COMPLETE:
                if transfer.writes_memory:
                    self.num_bytes_received += transfer.num_bytes
                else:
                    self.num_bytes_sent += transfer.num_bytes
            self._report(transfer, transfer.state)

    def _report(self, transfer: StageTransfer, state: StageSessionState) -> None:
        error = transfer.error if state is StageSessionState.FAILED else None
        event = StageSessionEvent(
            transfer.session_id,
            transfer.epoch,
            state,
            error.reason if error else "",
            str(error) if error else "",
            transfer.num_bytes,
            transfer.chunk_timings if state is StageSessionState.COMPLETE else (),
        )
        try:
            self._on_event(event)
        except Exception:  # an error of the listener must not stop the other sessions of this stage
            logger.exception("the listener failed on %s", event)
