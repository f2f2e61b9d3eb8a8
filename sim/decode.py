"""A simulated decode worker: reservations, arriving prompts, and generation by `sim.decode_pool`.

Tokens are sent when the request ends on this worker, at the time of the last token. A router does
not see the steps before that.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from google.protobuf.message import Message

from pool.prefix.journal import PointJournal
from pool.request.entry import Failed
from prefill.prompts import PrefillEntryEvent, Started
from protos import decode_pb2, transfer_pb2, types_pb2, worker_pb2
from runtime.errors import BatonError, CapacityError, DrainingError
from sim.cores import Alarm, Processor
from sim.decode_handler import DecodeRequest, SimulatedDecodeHandler
from sim.decode_pool import DecodePool, SimulatedRow
from sim.links import Arrival, Interface
from sim.network import Method, SimulatedCall
from sim.pages import CountedPages, LeasedPages
from sim.prefill import PrefillWorker
from sim.requests import RouterEnd
from sim.surroundings import Surroundings
from sim.worker import SimulatedWorker

TOKEN = 1  # every generated token


class DecodeWorker(SimulatedWorker):
    """Simulated worker that serves `Decode.Serve`."""

    role = "decode"

    def __init__(
        self,
        address: str,
        around: Surroundings,
        processor: Processor,
        own_prefill: PrefillWorker | None = None,
        on_span: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Create a decode worker.

        With `own_prefill` it has both roles. `on_span` gets the duration of a step when it changes.
        """
        self.interface = Interface(around.costs.network.bytes_per_s)
        self._arrivals = around.arrivals
        self._machine = around.machine
        self._loop = asyncio.get_running_loop()
        self._num_handlers = 0
        self._alarm: Alarm | None = None
        self._own_prefill = own_prefill
        self._on_span = on_span
        super().__init__(address, around.costs, processor)

    @property
    def start_s(self) -> float:
        return self.costs.decode.start_s

    @property
    def num_requests(self) -> int:
        return len(self._handlers)

    def check(self) -> None:
        self.pool.check()

    def drain(self) -> None:
        super().drain()
        for handler in tuple(self._handlers.values()):
            self._send_generated(handler)
            handler.request.end(DrainingError("the decode worker drains"))
            self._release(handler)

    def die(self) -> None:
        for handler in self._handlers.values():
            self._send_generated(handler)
        super().die()

    @property
    def _third_s(self) -> float:
        """Return the time taken when a request arrives, when its prompt lands, and at its end."""
        return self.costs.decode.request_s / 3

    @property
    def pages_used(self) -> int:
        """Return the number of pages in use now."""
        return (
            self.costs.decode.num_pages - self.pool.pages_free(self.processor.now())
            if self.pool.num_held
            else 0
        )

    def _begin(self) -> PointJournal:
        if self._alarm is not None:
            self._alarm.cancel()
        mine = self.costs.decode
        self._own_pages = (
            None if self._own_prefill is None else LeasedPages(self._own_prefill.pages)
        )
        self.pool = DecodePool(
            mine,
            self.costs.model.page_size,
            self._loop.time,
            self._own_pages or CountedPages(mine.num_pages),
        )
        self._handlers: dict[int, SimulatedDecodeHandler] = {}
        self._num_open = 0  # uncommitted requests
        return PointJournal()

    def _methods(self) -> dict[str, Method]:
        return {"/baton.v1.Decode/Serve": self._serve}

    def _described(self) -> worker_pb2.WorkerInfo:
        mine = self.costs.decode
        return worker_pb2.WorkerInfo(
            pages_total=mine.num_pages,
            slots_total=mine.num_slots,
            max_running_requests=mine.max_held,
            max_batch_requests=mine.max_running,
        )

    def _reported(self, *, serving: bool, reason: str) -> worker_pb2.WorkerLoad:
        pool = self.pool
        return worker_pb2.WorkerLoad(
            serving=serving,
            reason=reason,
            start_s=self.costs.decode.start_s,
            queued_requests=pool.num_waiting,
            running_requests=pool.num_held - pool.num_waiting,
            pages_free=pool.pages_free(self.processor.now()),
            slots_free=pool.slots_free,
            open_sessions=self._num_open,
            output_tokens=pool.num_generated(self.processor.now()),
        )

    def _serve(self, call: SimulatedCall) -> None:
        end: RouterEnd[decode_pb2.DecodeInput, decode_pb2.DecodeEvent] = RouterEnd(
            call,
            lambda event: decode_pb2.DecodeEvents(events=[event]),
            lambda key, ended: decode_pb2.DecodeEvent(key=key, ended=ended),
            self._opened,
        )

        def received(message: Message) -> None:
            assert isinstance(message, decode_pb2.DecodeInputs)
            for item in message.inputs:
                end.received(item)

        call.on_message = received

    def _opened(self, request: DecodeRequest, message: decode_pb2.DecodeInput) -> None:
        if message.open.HasField("source"):
            handler = self._reserve(request, message.open)
        else:
            handler = self._read(request, message.open)
        if handler is not None:
            request.on_input = lambda later: self._received(handler, later)
            request.on_gone = lambda: self._release(handler)

    def _reserve(
        self, made: DecodeRequest, opening: decode_pb2.DecodeOpen
    ) -> SimulatedDecodeHandler | None:
        self._num_handlers += 1
        request = opening.request
        num_again = len(opening.replayed_token_ids)
        num_prompt = len(request.prompt_token_ids)
        row = SimulatedRow(
            self._num_handlers,
            num_prompt + num_again,
            request.max_tokens - 1 - num_again,
            request.priority,
            again=num_again,
        )
        try:
            self.check_serving()
            self.pool.reserve(row)
        except BatonError as error:
            made.end(error)
            return None
        handler = SimulatedDecodeHandler(
            made,
            row,
            f"{self.incarnation}/{row.key}",
            num_tokens=1 + num_again,
            num_bytes=self.costs.handoff_bytes(num_prompt),
        )
        self._handlers[row.key] = handler
        self._num_open += 1
        self._woken()
        landed_s = self.costs.decode.landed_s * num_prompt
        waited_for_s = self._third_s + landed_s / 3
        if self.pool.interrupt(waited_for_s, self.processor.now()):
            self._plan()
        else:
            self.processor.spend(waited_for_s)
        self.processor.spend(landed_s * 2 / 3)
        self._offered(handler)
        return handler

    def _read(
        self, made: DecodeRequest, opening: decode_pb2.DecodeOpen
    ) -> SimulatedDecodeHandler | None:
        """Have the prompt of a request computed here."""
        request = opening.request
        self._num_handlers += 1
        row = SimulatedRow(
            self._num_handlers,
            len(request.prompt_token_ids),
            request.max_tokens - 1,
            request.priority,
        )
        handler = SimulatedDecodeHandler(made, row, "", num_tokens=0, is_committed=True)
        prefill = self._own_prefill
        try:
            self.check_serving()
            if prefill is None:
                raise CapacityError("the prompt is not cached", resource="prefix cache")
            prompt = prefill.intake.read(
                request,
                opening.holder.address,
                partial(self._computed, handler, prefill),
                partial(self._queued, handler),
            )
        except BatonError as error:
            made.end(error)
            return None
        self._handlers[row.key] = handler
        handler.prompt = prompt
        self._woken()
        return handler

    def _queued(self, handler: SimulatedDecodeHandler, local: decode_pb2.DecodeLocal) -> None:
        """Tell the router that the prompt is queued here."""
        self._send(handler, decode_pb2.DecodeEvent(local=local))

    def _computed(
        self, handler: SimulatedDecodeHandler, prefill: PrefillWorker, event: PrefillEntryEvent
    ) -> None:
        """Continue with a prompt that was computed here, in its pages."""
        prompt = handler.prompt
        if prompt is None or isinstance(event, Started):
            return
        if isinstance(event, Failed):
            self._release(handler)
            handler.request.end(event.error)
            return
        assert self._own_pages is not None
        handler.prompt = None
        memory = prefill.intake.hand_over(prompt)
        memory.slot.end()  # the slots of decode are counted apart
        handler.row.num_pages = self._own_pages.adopt(handler.row.key, memory.pages)
        self.pool.adopt(handler.row)
        self._send(handler, decode_pb2.DecodeEvent(tokens=types_pb2.TokenChunk(token_ids=[TOKEN])))
        handler.num_tokens = 1
        self._begin_decode(handler)

    def _received(self, handler: SimulatedDecodeHandler, message: decode_pb2.DecodeInput) -> None:
        if handler.is_committed:
            return
        match message.WhichOneof("input"):
            case "new_source":
                self._offered(handler)
            case "first_token":
                handler.first_token_s = self._loop.time()
                self._commit_if_complete(handler)

    def _offered(self, handler: SimulatedDecodeHandler) -> None:
        """Expect the pages that a prefill worker offers, and send destination terms."""
        self._arrivals.pop((handler.session_id, handler.epoch), None)
        handler.num_offers += 1
        handler.has_landed = False
        self._arrivals[handler.session_id, handler.epoch] = Arrival(
            self.interface, lambda: self._pages_received(handler)
        )
        terms = transfer_pb2.DestinationTerms(session_id=handler.session_id, epoch=handler.epoch)
        handler.request.send(decode_pb2.DecodeEvent(destination=terms))

    def _pages_received(self, handler: SimulatedDecodeHandler) -> None:
        self.num_received_bytes += handler.num_bytes
        handler.has_landed = True
        self._commit_if_complete(handler)

    def _commit_if_complete(self, handler: SimulatedDecodeHandler) -> None:
        if (
            not handler.has_landed
            or handler.first_token_s is None
            or handler.row.key not in self._handlers
        ):
            return
        handler.is_committed = True
        self._num_open -= 1
        self.pool.delay(self._third_s)
        self._arrivals.pop((handler.session_id, handler.epoch), None)
        self._send(
            handler,
            decode_pb2.DecodeEvent(
                committed=decode_pb2.DecodeCommitted(
                    transfer_exposed_s=self._loop.time() - handler.first_token_s,
                    num_bytes=round(handler.num_bytes),
                )
            ),
        )
        self._begin_decode(handler)

    def _begin_decode(self, handler: SimulatedDecodeHandler) -> None:
        """Generate the tokens after the first."""
        if handler.row.left <= 0:
            self._finish(handler)
            self.pool.release(handler.row, self.processor.now())
        else:
            self.pool.join(handler.row, self.processor.now())
        self._plan()

    def _advance(self) -> None:
        self._alarm = None
        for row in self.pool.advance(self.processor.now()):
            self._finish(self._handlers[row.key])
        self._plan()

    def _plan(self) -> None:
        """Set the alarm for the end of the pool's span."""
        span = self.pool.span
        messages = (
            0.0 if span is None else self._machine.messages(self.pool.num_running, span.first_s)
        )
        self.processor.compute(is_computing=span is not None, messages=messages)
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if span is None else self.processor.call_at(span.ends_s, self._advance)
        if span is not None:
            self._on_span(span.first_s)

    def _finish(self, handler: SimulatedDecodeHandler) -> None:
        self._send_generated(handler)
        row = handler.row
        now = self._loop.time()
        first_s = now if row.first_step_s is None else row.first_step_s
        self._send(
            handler,
            decode_pb2.DecodeEvent(
                finished=decode_pb2.DecodeFinished(
                    reason=types_pb2.FINISH_REASON_LENGTH,
                    queue_s=max(0.0, first_s - row.joined_s),
                    decode_s=now - first_s,
                    num_preemptions=row.num_preemptions,
                )
            ),
        )
        handler.request.end()
        self.processor.spend(self._third_s)
        del self._handlers[row.key]

    def _send_generated(self, handler: SimulatedDecodeHandler) -> None:
        count = self.pool.generated(handler.row, self.processor.now())
        if count:
            self._send(
                handler,
                decode_pb2.DecodeEvent(tokens=types_pb2.TokenChunk(token_ids=[TOKEN] * count)),
            )
            handler.num_tokens += count

    def _send(self, handler: SimulatedDecodeHandler, event: decode_pb2.DecodeEvent) -> None:
        event.position = handler.num_tokens
        handler.request.send(event)

    def _release(self, handler: SimulatedDecodeHandler) -> None:
        if self._handlers.pop(handler.row.key, None) is None:
            return
        self._num_open -= not handler.is_committed
        self._arrivals.pop((handler.session_id, handler.epoch), None)
        if handler.prompt is not None and self._own_prefill is not None:
            self._own_prefill.intake.give_up(handler.prompt)
            handler.prompt = None
        self.pool.release(handler.row, self.processor.now())
        if self.server.is_up:
            self._plan()
