"""The Decode service: runs a router's requests (`pool.request.router_call`), each from its
reservation to its last token.

open ─▶ reserve on all stages, post receives ─▶ destination ─▶ … bytes land, digests match …
    first_token ───────────────────────────────▶ committed ─▶ tokens … ─▶ finished, ended
    source_lost (a prefill worker failed), new_source ─▶ destination of the next epoch, same memory
open without a source ─▶ local (nearly all of the prompt is cached) ─▶ tokens …; else rejected
open with replayed tokens (another pool was lost) ─▶ the same; they are computed again before a new
token is sampled
"""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

import grpc

from decode.entry import DecodeEntryEvent, Generated
from decode.event_sender import DecodeEventSender
from decode.handler import DecodeHandler, DecodeInbox, DecodeParts, LocalPrefillHandler, receive
from decode.in_place import InPlaceHandler
from decode.local_prompts import PromptReader
from decode.request_memory import Reservation
from decode.scheduler import DecodeScheduler
from engine.core.request import Request
from pool.request.conversion import in_vocabulary
from pool.request.handler import Brought, EventPost, read_request, serve
from pool.request.router_call import Opening, RequestKind, RouterCall
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc
from runtime.clock import Deadline
from runtime.digests import in_common
from runtime.errors import FieldViolation, HandoffError, InvalidRequestError
from runtime.rpc.calls import CallTracker
from transfer.plan import codec
from transfer.plan.handoff_terms import SourceTerms

HANDOFF_TIMEOUT_S = 60.0  # seconds in one state of the handoff, for a request without a deadline


def _emit(
    post: EventPost, receive: Callable[[DecodeEntryEvent], None], event: DecodeEntryEvent
) -> None:
    """Post an event to the event loop's thread; called on the engine thread.

    Tokens may wait for those of the next steps if these are short.
    """
    post.put(receive, event, can_wait=isinstance(event, Generated))


DecodeContext = grpc.aio.ServicerContext[pb.DecodeInputs, pb.DecodeEvents]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """The gRPC servicer of the Decode service.

    The scheduler makes every decision, and the transfer agents move every byte.
    """

    def __init__(self, parts: DecodeParts, calls: CallTracker) -> None:
        """Create the servicer; `calls` tracks the calls of its server."""
        self._parts = parts
        for scheduler in parts.ranks.schedulers:
            scheduler.on_preempted = parts.arrivals.preempted
        self._calls = calls
        self._kind: RequestKind[pb.DecodeInput, pb.DecodeEvent] = RequestKind(
            "/baton.v1.Decode/Generate",
            self._generate,
            lambda item: item.open.context,
            lambda key, ended: pb.DecodeEvent(key=key, ended=ended),
        )

    async def Serve(
        self, request_iterator: AsyncIterator[pb.DecodeInputs], context: DecodeContext
    ) -> AsyncIterator[pb.DecodeEvents]:
        num_taken = len(self._parts.ranks.schedulers) * self._parts.plan.max_held
        call = RouterCall(
            self._kind, self._calls, self._parts.meters.handoff.leases_expired, num_taken
        )
        async with aclosing(
            call.events(message.inputs async for message in request_iterator)
        ) as batches:
            async for events in batches:
                yield pb.DecodeEvents(events=events)

    async def _generate(self, opening: Opening[pb.DecodeInput, pb.DecodeEvent]) -> None:
        parts = self._parts
        asked = opening.input.open
        request = read_request(parts, asked.request, role="decode")
        source = codec.source_from_proto(asked.source) if asked.HasField("source") else None
        replayed = _replayed(asked, request, vocab_size=parts.plan.description.facts.vocab_size)
        inbox: DecodeInbox = opening.inbox
        deadline = Deadline.after(parts.ranks.schedulers[0].clock, opening.timeout_s)
        event_sender = DecodeEventSender(
            opening.event_sender, 0 if source is None else 1 + len(replayed)
        )
        emit = partial(_emit, parts.post, partial(receive, event_sender, inbox))
        remaining_s = deadline.remaining_s()
        timeout_s = HANDOFF_TIMEOUT_S if math.isinf(remaining_s) else remaining_s

        async def take_place() -> DecodeHandler | LocalPrefillHandler | InPlaceHandler:
            mine = parts.leader.compatibility.digest
            alike = mine if source is None else in_common(mine, source.compatibility)
            blocks = parts.blocks_of(request, alike)
            kept_as = alike if parts.caches and request.uses_cache else ""
            brought = Brought()
            if source is None:
                brought = await parts.bring(request, blocks, asked.holder)

            def take(scheduler: DecodeScheduler) -> Reservation:
                admit = (
                    scheduler.read_rest
                    if source is None
                    else partial(scheduler.reserve, replayed=replayed)
                )
                taken = admit(
                    request, emit, blocks=blocks, compatibility=kept_as, deadline=deadline
                )
                # Posted through the same queue as tokens, so that it precedes them.
                if source is None:
                    num_cached = taken.held_tokens
                    local = pb.DecodeLocal(cached_tokens=num_cached, **brought.counts(num_cached))
                    parts.post.put(event_sender.local, local)
                return taken

            prompts = None if source is None else _prompts_here(parts, source)
            if source is not None and prompts is not None:
                key = source.request_key
                expect = partial(prompts.expect, key, request, emit, replayed=replayed)
                expect = partial(expect, blocks=blocks, compatibility=kept_as, deadline=deadline)
                await parts.leader.loop.submit(
                    expect, undo=lambda _: parts.ranks.of(key).release(key)
                )
                return InPlaceHandler(parts, inbox, event_sender, prompts, request, key, timeout_s)
            reservation = await parts.leader.loop.submit(
                lambda: parts.ranks.place(request, blocks, take, brought.data_rank),
                undo=lambda taken: parts.ranks.of(taken.key).release(taken.key),
            )
            if source is None:
                return LocalPrefillHandler(parts, inbox, reservation)
            return DecodeHandler(
                parts, inbox, event_sender, request, reservation, source, alike, timeout_s
            )

        await serve(parts, request, take_place)


def _prompts_here(parts: DecodeParts, source: SourceTerms) -> PromptReader | None:
    """Return the reader of the prompt if the source is this pool, else None.

    Raises:
        HandoffError: it is this pool, which does not have the prompt any more.
    """
    if parts.prompts_of is None:
        return None
    if not parts.leader.group.includes(source.stages):
        return None
    prompts = parts.prompts_of(source.request_key)
    if prompts is None:
        raise HandoffError("the prompt is not in this pool's memory any more")
    return prompts


def _replayed(opening: pb.DecodeOpen, request: Request, *, vocab_size: int) -> tuple[int, ...]:
    """Return the replayed tokens.

    Raises:
        InvalidRequestError: this request cannot have sampled these tokens.
    """
    if (count := len(opening.replayed_token_ids)) >= request.max_tokens:
        raise InvalidRequestError(
            FieldViolation(
                "replayed_token_ids",
                f"the first token and {count} replayed ones exceed max_tokens, {request.max_tokens}",
            )
        )
    return in_vocabulary("replayed_token_ids", opening.replayed_token_ids, vocab_size)
