"""The flows of one stage by session: opens, replaces, closes and drains them, and reports what becomes of each."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from runtime.clock import Clock
from runtime.errors import BatonError
from transfer.agent.stage_transfer import Flow
from transfer.plan.terms import StageSessionEvent, StageSessionState
from transfer.transport.protocol import Operation, Peer, Transport

logger = logging.getLogger(__name__)


@dataclass
class _Closing:
    """A closed flow whose operations have not all ended. At `cut_at_s` its connections are cut."""

    flow: Flow
    closed_at_s: float
    cut_at_s: float


class FlowTable:
    """Belongs to the agent's thread; the counters may be read by others."""

    def __init__(self, transport: Transport, clock: Clock, on_event: Callable[[StageSessionEvent], None], *,
                 drain_s: float) -> None:
        self._transport = transport
        self._clock = clock
        self._on_event = on_event
        self._drain_s = drain_s
        self._open: dict[str, Flow] = {}
        self._next: dict[str, Flow] = {}  # newer epochs that wait for the older one's drain
        self._closing: list[_Closing] = []
        self._owners: dict[Operation, Flow] = {}
        self._drains: list[Future[None]] = []  # of `close_all`
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
        """Flows that still owe a DRAINED report."""
        return self.num_open + self.num_draining

    def open(self, flow: Flow) -> None:
        """Start a flow. It replaces an older epoch of its session; a stale or repeated epoch is refused."""
        current = self._next.get(flow.session_id) or self._open.get(flow.session_id)
        if current is not None and current.epoch >= flow.epoch:
            logger.warning("session %s: epoch %d ignored, epoch %d is open", flow.session_id, flow.epoch, current.epoch)
            return
        if current is not None:
            self.close(flow.session_id)
        if flow.writes_memory and any(self._conflicts(closing.flow, flow) for closing in self._closing):
            self._next[flow.session_id] = flow
        else:
            self._start(flow)

    def close(self, session_id: str) -> None:
        """Stop the session's flows; each reports DRAINED when its operations have ended."""
        now = self._clock.now()
        for flow in (self._open.pop(session_id, None), self._next.pop(session_id, None)):
            if flow is not None:
                flow.stop()
                self._closing.append(_Closing(flow, now, now + self._drain_s))

    def close_flow(self, flow: Flow) -> None:
        """Close this flow, unless a newer epoch has replaced it."""
        if self._open.get(flow.session_id) is flow:
            self.close(flow.session_id)

    def fail(self, flow: Flow, error: BatonError) -> None:
        """It cannot go on, for a reason outside of it."""
        flow.fail(error)
        self._report_change(flow)

    def close_all(self, drained: Future[None]) -> None:
        """Close every session; `drained` is done when no flow is left."""
        self._drains.append(drained)
        for session_id in [*self._open, *self._next]:
            self.close(session_id)

    def started(self, flow: Flow, operation: Operation) -> None:
        """The flow has started this operation."""
        self._owners[operation] = flow

    def ended(self, operation: Operation) -> None:
        """Tell the operation's flow, and everybody what became of it."""
        flow = self._owners.pop(operation)
        try:
            flow.on_operation(operation)
        except BatonError as error:
            flow.fail(error)
        self._report_change(flow)

    def sweep(self, idle_s: float) -> float:
        """Report drains, cut overdue connections; how long there is nothing to sweep, at most `idle_s`."""
        if not self._closing:
            self._settle()
            return idle_s
        drained = [closing.flow for closing in self._closing if self._is_drained(closing.flow)]
        self._closing = [closing for closing in self._closing if closing.flow not in drained]
        for flow in drained:
            self._report(flow, StageSessionState.DRAINED)
            waiting = self._next.get(flow.session_id)
            if waiting is not None and not any(self._conflicts(closing.flow, waiting) for closing in self._closing):
                self._start(self._next.pop(flow.session_id))
        self._settle()
        now = self._clock.now()
        busy = [closing for closing in self._closing if closing.flow.num_outstanding]
        for closing in busy:
            if now >= closing.cut_at_s:
                logger.warning("session %s epoch %d: %d operations have not ended %.1f s after the close, cutting "
                               "their connections", closing.flow.session_id, closing.flow.epoch,
                               closing.flow.num_outstanding, now - closing.closed_at_s)
                self._cut(operation.peer for operation in closing.flow.outstanding)
                closing.cut_at_s = now + self._drain_s
        return min([idle_s, *(closing.cut_at_s - now for closing in busy)])

    def fail_all(self, error: BatonError) -> None:
        """The stage cannot serve any more."""
        for flow in [*self._open.values(), *self._next.values()]:
            self.fail(flow, error)

    def transport_closed(self) -> None:
        """With the transport gone nothing can be touched any more: what is left is drained."""
        flows = [*self._open.values(), *self._next.values(), *(closing.flow for closing in self._closing)]
        self._open.clear()
        self._next.clear()
        self._closing.clear()
        self._owners.clear()
        for flow in flows:
            self._report(flow, StageSessionState.DRAINED)
        self._settle()

    def _settle(self) -> None:
        while self._drains and not self.num_unfinished:
            self._drains.pop().set_result(None)

    def _start(self, flow: Flow) -> None:
        self._open[flow.session_id] = flow
        try:
            flow.start()
            self._report(flow, StageSessionState.OPEN)
        except BatonError as error:
            flow.fail(error)
        for operation in flow.outstanding:
            self.started(flow, operation)
        self._report_change(flow)

    def _cut(self, peers: Iterable[Peer]) -> None:
        for peer in set(peers):
            self._transport.close_peer(peer)

    def _is_drained(self, flow: Flow) -> bool:
        """Nor is an older epoch under way, even if this one never started: the last report speaks for the session."""
        return flow.num_outstanding == 0 and not any(
            closing.flow.num_outstanding and closing.flow.epoch < flow.epoch and self._conflicts(closing.flow, flow)
            for closing in self._closing)

    @staticmethod
    def _conflicts(older: Flow, newer: Flow) -> bool:
        return older.writes_memory and older.session_id == newer.session_id

    def _report_change(self, flow: Flow) -> None:
        if flow.state is not StageSessionState.OPEN and not flow.is_outcome_reported:
            flow.is_outcome_reported = True
            if flow.state is StageSessionState.COMPLETE:
                if flow.writes_memory:
                    self.num_bytes_received += flow.num_bytes
                else:
                    self.num_bytes_sent += flow.num_bytes
            self._report(flow, flow.state)

    def _report(self, flow: Flow, state: StageSessionState) -> None:
        error = flow.error if state is StageSessionState.FAILED else None
        event = StageSessionEvent(flow.session_id, flow.epoch, state, error.reason if error else "",
                                  str(error) if error else "", flow.num_bytes,
                                  flow.departures if state is StageSessionState.COMPLETE else ())
        try:
            self._on_event(event)
        except Exception:  # the listener's bug must not stop the other sessions of this stage
            logger.exception("the listener failed on %s", event)
