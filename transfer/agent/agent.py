"""Transfer agent of one stage, for all of its handoffs.

It posts receives into pool pages, sends pool pages, authenticates items, and proves drains.

The agent owns one thread, which alone uses the transport. All public methods may be called from any
thread and return at once. Results are reported through `on_event`, which the agent's thread calls.
So `on_event` must be quick: it should pass the event to an event loop or a queue.

The reports of one epoch of one session, in order:

    OPEN        receives are posted, or the sends are planned
    COMPLETE    receiving: everything was received and is authentic; sending: every byte has been sent
      or FAILED with a reason, instead of OPEN or after it: no more messages are matched or sent for it
    DRAINED     only after `close`, `close_request`, `close_all` or a newer epoch; exactly once, always last: from
                here on that memory can no longer be read or written

A newer epoch of an open session replaces the old one, which the agent closes. The new one starts
only when the old one is DRAINED, so late bytes of the old epoch cannot be written anywhere.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from runtime.clock import Clock
from runtime.errors import BatonError, IncompatiblePeerError, InternalError
from transfer.agent.prompts import DeviceEvent, DoneLayer, PromptTransfer, PromptTransfers
from transfer.agent.sender import Sender, SendWindow
from transfer.agent.stage_transfer import PoolMemory, Receiver, RefusedTransfer, StageTransfer
from transfer.agent.transfer_table import TransferTable
from transfer.plan.copy_plan import check_plan
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageEndpoint,
    StageSessionEvent,
)
from transfer.transport.protocol import Operation, Transport

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
# polling interval while layers wait for the device, whose events wake no thread
DEVICE_WAIT_S = 200e-6
START_S = 60.0  # a CUDA context may take seconds


@dataclass(frozen=True)
class AgentLimits:
    """Limits of an agent.

    `window_bytes`: bytes in flight to one peer. `drain_s`: seconds from a close until connections
    are cut to force the drain. `layer_s`: seconds from the launch of a layer on a device until it
    must be done. At most `max_waiting_layers` wait for that.
    """

    window_bytes: int = 4 << 20
    drain_s: float = 3.0
    layer_s: float = 30.0
    max_waiting_layers: int = 65_536


@dataclass(frozen=True)
class AgentStats:
    """Totals since the start, and current counts."""

    num_bytes_sent: int
    num_bytes_received: int
    num_open: int
    num_draining: int
    num_pending_operations: int
    num_waiting_layers: int = 0
    num_prompts: int = 0


class TransferAgent:
    """Sender and receiver of items for one stage.

    `incarnation` identifies this stage in a `SourceTerms` or `DestinationTerms`. Terms for another
    process, such as an earlier incarnation of this one, are rejected with a FAILED report.
    """

    def __init__(
        self,
        *,
        memory: PoolMemory,
        transport: Transport,
        clock: Clock,
        incarnation: str,
        on_event: Callable[[StageSessionEvent], None],
        limits: AgentLimits | None = None,
        on_thread_start: Callable[[], None] = lambda: None,
        mark: Callable[[], DeviceEvent | None] = lambda: None,
    ) -> None:
        """Create the agent.

        `mark` returns an event after the work that a device was given until now, for any thread.
        `on_thread_start` prepares the agent's thread before its first step: for pools on a device,
        the thread needs a context of it. `start` raises its errors.
        """
        self._memory = memory
        self._transport = transport
        self._clock = clock
        self._incarnation = incarnation
        self._address = transport.address
        limits = limits or AgentLimits()
        self._window = SendWindow(limits.window_bytes)
        self._transfers = TransferTable(transport, clock, on_event, drain_s=limits.drain_s)
        self._prompts = PromptTransfers(
            self._transfers, clock, max_waiting=limits.max_waiting_layers, layer_s=limits.layer_s
        )
        self._commands: deque[Callable[[], None]] = deque()
        self._on_thread_start = on_thread_start
        self._mark = mark
        self._has_started = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._is_abandoned = False
        self._failure: BaseException | None = None

    @property
    def address(self) -> bytes:
        """Return the address to which peers connect; it is sent only over gRPC."""
        return self._address

    @property
    def incarnation(self) -> str:
        return self._incarnation

    @property
    def endpoint(self) -> StageEndpoint:
        """Return this stage as an entry of `SourceTerms.stages` and `DestinationTerms.stages`."""
        here = self._memory.geometry
        return StageEndpoint(here.layers, self._address, self._incarnation, here.tensor)

    @property
    def failure(self) -> BaseException | None:
        """Return the error that ended the agent's thread and thus the stage, or None."""
        return self._failure

    def stats(self) -> AgentStats:
        transfers = self._transfers
        return AgentStats(
            transfers.num_bytes_sent,
            transfers.num_bytes_received,
            transfers.num_open,
            transfers.num_draining,
            self._transport.num_pending,
            self._prompts.num_waiting,
            self._prompts.num_open,
        )

    def start(self) -> None:
        """Start the agent's thread.

        Raises InternalError if it was started before, and any error of its first step:
        `ConfigError` and `InternalError` for an unusable device.
        """
        if self._thread is not None:
            raise InternalError("the transfer agent was started twice")
        self._thread = threading.Thread(target=self._run, name="transfer-agent", daemon=True)
        self._thread.start()
        if not self._has_started.wait(START_S):
            raise InternalError(f"the transfer agent's thread has not started within {START_S} s")
        if self._failure is not None:
            raise self._failure

    def open_receive(self, source: SourceTerms, destination: DestinationTerms) -> None:
        """Post the receives of one epoch.

        The destination terms go to the source after every stage has reported OPEN.
        """
        self._submit(lambda: self._transfers.open(self._receiver(source, destination)))

    def expect_send(self, request_key: int, num_tokens: int | None = None) -> None:
        """Record `layer_done` of this request from now on; call it before the first forward.

        `num_tokens` of the prompt is checked against the terms if it is known. A later stage gets a
        request chunk by chunk and takes its length from the terms.
        """
        self._submit(lambda: self._expect_send(request_key, num_tokens))

    def layer_done(
        self, request_key: int, layer_id: int, num_tokens: int, *, after: DeviceEvent | None = None
    ) -> None:
        """Record that the first `num_tokens` tokens of the request have passed this layer.

        Their cache entries are final, or will be once the device has passed the event `after`. For
        the engine thread; costs a few microseconds. Unknown requests are ignored.
        """
        self._submit(
            lambda: self._prompts.layer_done(DoneLayer(request_key, layer_id, num_tokens), after)
        )

    def open_send(
        self, request_key: int, source: SourceTerms, destination: DestinationTerms
    ) -> None:
        """Send the items that `layer_done` releases, beginning with those already released."""
        self._submit(lambda: self._open_send(request_key, source, destination))

    def send_cached(self, source: SourceTerms, destination: DestinationTerms) -> None:
        """Send items of cached entries, all of which have been launched; `close` ends it."""
        after = self._mark()
        self._submit(lambda: self._send_cached(source, destination, after))

    def close(self, session_id: str) -> None:
        """Release (after COMPLETE) or abort (before) a session.

        Idempotent; ignores unknown sessions.
        """
        self._submit(lambda: self._close(session_id))

    def close_request(self, request_key: int) -> None:
        """Close the request's session, if any, and drop its progress. Idempotent.

        Later reports about the request, from a batch in flight, are ignored.
        """
        self._submit(lambda: self._prompts.close(request_key))

    def close_all(self) -> Future[None]:
        """Close every session and drop every request.

        The pool has lost its leader, and the next leader reuses request keys. The future is done
        when all sessions have drained and none was opened meanwhile. After that no earlier
        operation can read or write the pools.
        """
        drained: Future[None] = Future()
        drained.set_running_or_notify_cancel()  # prevents a waiter from cancelling it
        self._submit(lambda: self._close_all(drained))
        return drained

    def shutdown(self, timeout_s: float) -> bool:
        """Close everything, wait for the drain and stop the thread.

        Returns False if the time was too short; then connections are cut.
        """
        if self._thread is None:
            self._transport.close()
            return True
        self.close_all()
        self._is_stopping = True
        self._transport.wake()
        self._thread.join(timeout_s)
        drained = not self._thread.is_alive()
        self._is_abandoned = True
        self._transport.wake()
        self._thread.join(timeout_s)
        return drained

    # The agent's thread runs all methods below.

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._transport.wake()

    def _run(self) -> None:
        if not self._enter():
            self._transport.close()
            return
        try:
            while not self._is_abandoned and (
                not self._is_stopping or self._commands or self._transfers.num_unfinished
            ):
                self._turn()
        # The edge of the thread: report the error, so that no caller waits for it.
        except BaseException as error:
            self._failure = error
            self._transfers.fail_all(InternalError(f"the transfer agent has failed: {error!r}"))
            raise
        finally:
            self._close_transport()

    def _enter(self) -> bool:
        """Run the first steps of the thread; return whether they succeeded.

        `start` raises their errors.
        """
        try:
            self._on_thread_start()
            for operation in self._transport.progress():
                self._ended(operation)
        except Exception as error:  # noqa: BLE001 (the edge of the thread)
            self._failure = error
        self._has_started.set()
        return self._failure is None

    def _close_transport(self) -> None:
        """Close the transport, then report DRAINED.

        Memory that may still be accessed is never reported as DRAINED.
        """
        try:
            self._transport.close()
        except BatonError as error:
            logger.exception("the transport failed to release the pools' memory")
            self._failure = self._failure or error
            return
        self._transfers.transport_closed()

    def _turn(self) -> None:
        was_busy = bool(self._commands)
        while self._commands:
            self._commands.popleft()()
        was_busy |= self._prompts.poll()
        ended = self._transport.progress()
        for operation in ended:
            self._ended(operation)
        for sender, operation in self._window.pump():
            self._transfers.started(sender, operation)
        longest_s = DEVICE_WAIT_S if self._prompts.num_waiting else IDLE_WAIT_S
        wait_s = self._transfers.sweep(longest_s)
        if not ended and not was_busy:
            self._transport.wait(wait_s)

    def _ended(self, operation: Operation) -> None:
        self._window.ended(operation)
        self._transfers.ended(operation)

    def _receiver(self, source: SourceTerms, destination: DestinationTerms) -> StageTransfer:
        try:
            stage = self._stage_of(destination.stages)
            lanes = check_plan(source, destination, self._memory.geometry.specs).lanes_to(stage)
        except BatonError as error:
            return RefusedTransfer(source, destination, self._transport, error)
        return Receiver(source, destination, lanes, memory=self._memory, transport=self._transport)

    def _sender(
        self, source: SourceTerms, destination: DestinationTerms, prompt: PromptTransfer
    ) -> StageTransfer:
        try:
            if prompt.error is not None:
                raise prompt.error
            if prompt.num_tokens not in (None, source.num_tokens):
                raise InternalError(
                    f"session {destination.session_id}: expect_send announced {prompt.num_tokens} "
                    f"tokens, the terms {source.num_tokens}"
                )
            stage = self._stage_of(source.stages)
            lanes = check_plan(source, destination, self._memory.geometry.specs).lanes_from(stage)
        except BatonError as error:
            return RefusedTransfer(source, destination, self._transport, error)
        return Sender(
            source,
            destination,
            lanes,
            memory=self._memory,
            transport=self._transport,
            window=self._window,
            clock=self._clock,
        )

    def _stage_of(self, stages: tuple[StageEndpoint, ...]) -> int:
        for index, stage in enumerate(stages):
            if stage.incarnation == self._incarnation:
                own = self._memory.geometry
                if (stage.layers, stage.tensor) != (own.layers, own.tensor):
                    raise IncompatiblePeerError(
                        f"stage {index} has layers {own.layers} of rank {own.tensor.rank} of "
                        f"{own.tensor.size}, not {stage.layers} of rank {stage.tensor.rank} of "
                        f"{stage.tensor.size}"
                    )
                return index
        raise IncompatiblePeerError(
            f"terms for {[stage.incarnation for stage in stages]}; this is {self._incarnation}"
        )

    def _expect_send(self, request_key: int, num_tokens: int | None) -> None:
        self._prompts.expect(request_key, num_tokens)

    def _open_send(
        self, request_key: int, source: SourceTerms, destination: DestinationTerms
    ) -> None:
        prompt = self._prompts.expect(request_key, source.num_tokens)
        transfer = self._sender(source, destination, prompt)
        prompt.transfers.append(transfer)
        self._transfers.open(transfer)
        if isinstance(transfer, Sender):
            transfer.release(prompt.layer_tokens)
        if self._prompts.is_closed(request_key):
            self._transfers.close_transfer(transfer)  # its closing call has come already

    def _send_cached(
        self, source: SourceTerms, destination: DestinationTerms, after: DeviceEvent | None
    ) -> None:
        transfer = self._sender(source, destination, PromptTransfer(source.num_tokens))
        self._transfers.open(transfer)
        self._prompts.release_all(transfer, after)

    def _close(self, session_id: str) -> None:
        self._transfers.close(session_id)
        self._prompts.forget_session(session_id)

    def _close_all(self, drained: Future[None]) -> None:
        self._prompts.clear()
        self._transfers.close_all(drained)
