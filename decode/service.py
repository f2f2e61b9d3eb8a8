"""The Decode service: one stream is one request, from reservation to its last token.

    open ─▶ reserve on all stages, post receives ─▶ destination ─▶ … bytes land, digests match …
        first_token ─────────────────────────────────────────▶ committed ─▶ tokens … ─▶ finished
        source_lost (the prefill worker died), new_source ─▶ destination of the next epoch, same memory
    open with replayed tokens (another pool was lost) ─▶ the same; they are computed again before a new one is drawn
"""

from collections.abc import AsyncIterator
from typing import cast

import grpc

from decode.active_request import ActiveRequest, DecodeInbox, DecodeParts, in_vocabulary
from engine.core.request import Request
from pool.request.conversion import check_grammar, request_from_proto
from pool.request.inbox import Inbox
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc
from runtime.errors import DeadlineError, FieldViolation, InvalidRequestError, UnavailableError
from runtime.log import bind
from runtime.tracing import note
from transfer.plan import codec

Context = grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeResponse]
OPEN_TIMEOUT_S = 10.0


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Thin: every decision is the scheduler's, every byte the transfer agents'."""

    def __init__(self, parts: DecodeParts) -> None:
        self._parts = parts

    async def Generate(self, request_iterator: AsyncIterator[pb.DecodeRequest],
                       context: Context) -> AsyncIterator[pb.DecodeResponse]:
        parts = self._parts
        if not parts.leader.serving:
            raise UnavailableError(f"the decode pool does not serve: {parts.leader.reason}")
        inbox: DecodeInbox = Inbox(request_iterator)
        opening = await inbox.first_message(OPEN_TIMEOUT_S)
        if opening.WhichOneof("input") != "open":
            raise InvalidRequestError(FieldViolation("input", "the first message must be open"))
        request = request_from_proto(opening.open.request, vocab_size=parts.plan.description.facts.vocab_size,
                                     max_context_tokens=parts.plan.max_context_tokens)
        source = codec.source_from_proto(opening.open.source)
        replayed = _replayed(opening.open, request, vocab_size=parts.plan.description.facts.vocab_size)
        note(request_id=request.request_id, prompt_tokens=len(request.prompt_token_ids))
        await check_grammar(request, parts.grammars)
        with bind(request_id=request.request_id), inbox:
            reservation = await parts.leader.loop.submit(
                lambda: parts.scheduler.reserve(request, inbox.emit, replayed=replayed),
                undo=lambda taken: parts.scheduler.release(taken.key))
            remaining_s = cast("float | None", context.time_remaining())  # None without a deadline; typed as a float
            arrival = ActiveRequest(parts, inbox, request, reservation, remaining_s)
            try:
                async for response in arrival.run(source):
                    yield response
            except DeadlineError:
                parts.meters.handoff.leases_expired.inc()
                raise
            finally:
                arrival.end()


def _replayed(opening: pb.DecodeOpen, request: Request, *, vocab_size: int) -> tuple[int, ...]:
    """Raises InvalidRequestError for tokens that this request cannot have drawn."""
    replayed = in_vocabulary("replayed_token_ids", opening.replayed_token_ids, vocab_size)
    if len(replayed) >= request.max_tokens:
        raise InvalidRequestError(FieldViolation(
            "replayed_token_ids", f"{len(replayed)} and a first one are more than max_tokens, {request.max_tokens}"))
    return replayed
