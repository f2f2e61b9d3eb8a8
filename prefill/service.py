"""The Prefill service: one stream is one request, from the queue until decode has its bytes.

    request ─▶ queued ─▶ started (source terms) … chunks run … ─▶ first_token
         destination (whenever decode has reserved) ─▶ layers leave as they complete ─▶ sent
         half-close by the router: decode has committed ─▶ pages freed, stream ends
"""

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from pool.request.stay import Inbox, open_stream, read_request, serve
from prefill.active_request import PrefillInbox, PrefillParts, PrefillStay
from protos import prefill_pb2 as pb
from protos import prefill_pb2_grpc

Context = grpc.aio.ServicerContext[pb.RunRequest, pb.RunResponse]


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Thin: every decision is the scheduler's, every byte the transfer agents'."""

    def __init__(self, parts: PrefillParts) -> None:
        self._parts = parts

    async def Run(self, request_iterator: AsyncIterator[pb.RunRequest],
                  context: Context) -> AsyncIterator[pb.RunResponse]:
        parts = self._parts
        opening = await open_stream(parts, request_iterator, role="prefill", expected="request")
        request = read_request(parts, opening.request)
        inbox: PrefillInbox = Inbox(request_iterator)

        async def begin() -> PrefillStay:
            key = await parts.leader.loop.submit(lambda: parts.scheduler.submit(request, inbox.emit),
                                                 undo=parts.scheduler.release)
            return PrefillStay(parts, inbox, request, key)

        async with aclosing(serve(parts, inbox, request, begin)) as responses:
            async for response in responses:
                yield response
