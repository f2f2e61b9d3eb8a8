"""The Decode service: one stream is one request, from reservation to its last token.

    open ─▶ reserve on all stages, post receives ─▶ destination ─▶ … bytes land, digests match …
        first_token ─────────────────────────────────────────▶ committed ─▶ tokens … ─▶ finished
        source_lost (the prefill worker died), new_source ─▶ destination of the next epoch, same memory
    open with replayed tokens (another pool was lost) ─▶ the same; they are computed again before a new one is drawn
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import cast

import grpc

from decode.active_request import DecodeInbox, DecodeParts, DecodeStay
from engine.core.request import Request
from pool.request.conversion import in_vocabulary
from pool.request.stay import Inbox, open_stream, read_request, serve
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc
from runtime.errors import FieldViolation, InvalidRequestError
from transfer.plan import codec

Context = grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeResponse]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Thin: every decision is the scheduler's, every byte the transfer agents'."""

    def __init__(self, parts: DecodeParts) -> None:
        self._parts = parts

    async def Generate(self, request_iterator: AsyncIterator[pb.DecodeRequest],
                       context: Context) -> AsyncIterator[pb.DecodeResponse]:
        parts = self._parts
        opening = (await open_stream(parts, request_iterator, role="decode", expected="open")).open
        request = read_request(parts, opening.request)
        source = codec.source_from_proto(opening.source)
        inbox: DecodeInbox = Inbox(request_iterator)
        replayed = _replayed(opening, request, vocab_size=parts.plan.description.facts.vocab_size)

        async def begin() -> DecodeStay:
            reservation = await parts.leader.loop.submit(
                lambda: parts.scheduler.reserve(request, inbox.emit, replayed=replayed),
                undo=lambda taken: parts.scheduler.release(taken.key))
            remaining_s = cast("float | None", context.time_remaining())  # None without a deadline; typed as a float
            return DecodeStay(parts, inbox, request, reservation, source, remaining_s)

        async with aclosing(serve(parts, inbox, request, begin)) as responses:
            async for response in responses:
                yield response


def _replayed(opening: pb.DecodeOpen, request: Request, *, vocab_size: int) -> tuple[int, ...]:
    """Raises InvalidRequestError for tokens that this request cannot have drawn."""
    replayed = in_vocabulary("replayed_token_ids", opening.replayed_token_ids, vocab_size)
    if len(replayed) >= request.max_tokens:
        raise InvalidRequestError(FieldViolation(
            "replayed_token_ids", f"{len(replayed)} and a first one are more than max_tokens, {request.max_tokens}"))
    return replayed
