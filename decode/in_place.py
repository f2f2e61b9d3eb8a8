"""A request whose prompt this very pool has computed: it goes on in the prompt's memory."""

import secrets

from decode.event_sender import DecodeEventSender
from decode.handler import DecodeInbox, DecodeParts, finish
from decode.local_prompts import PromptReader
from engine.core.request import Request
from pool.request.entry import Failed
from pool.request.streams import SessionChanged
from protos import decode_pb2 as pb
from protos import transfer_pb2
from runtime.errors import FieldViolation, HandoffError, InternalError, InvalidRequestError
from runtime.observe.tracing import Span, begin


class InPlaceHandler:
    """One request that takes over the memory of a prompt. Implements `RequestHandler`.

    It follows the protocol of a handoff, in which nothing is sent: the terms say so, and the pool
    commits when the router has the first token.
    """

    def __init__(
        self,
        parts: DecodeParts,
        inbox: DecodeInbox,
        event_sender: DecodeEventSender,
        prompts: PromptReader,
        request: Request,
        key: int,
        timeout_s: float,
    ) -> None:
        """Create the handler of a request that will take over the prompt of `key` in `prompts`.

        `timeout_s` is the longest time until the first token.
        """
        self._parts = parts
        self._inbox = inbox
        self._event_sender = event_sender
        self._prompts = prompts
        self._request = request
        self._phase: Span | None = None
        self._key = key
        self._timeout_s = timeout_s

    async def run(self) -> None:
        parts, key = self._parts, self._key
        self._event_sender.destination(
            transfer_pb2.DestinationTerms(session_id=secrets.token_hex(8), in_place=True)
        )
        first_token = await self._first_token()
        self._phase = begin("baton.decode.generate", request_id=self._request.request_id)
        self._event_sender.committed(pb.DecodeCommitted())
        await parts.leader.loop.submit(lambda: self._prompts.join(key, first_token))
        parts.arrivals.local_prefills.labels("in_place").inc()
        await finish(parts, self._inbox)

    def end(self) -> None:
        """Release the memory once nothing can write it."""
        if self._phase is not None:
            self._phase.end()
        self._parts.reclaimer.end(
            lambda: self._parts.ranks.of(self._key).release(self._key),
            close=lambda: self._parts.forget(self._key),
        )

    async def _first_token(self) -> int:
        """Wait for the first token.

        Raises:
            HandoffError: another prefill worker replaces this pool, or the token is late.
        """
        while True:
            match await self._inbox.get(self._timeout_s, "the first token", HandoffError):
                case SessionChanged():
                    continue
                case Failed(error):
                    raise error.again()
                case pb.DecodeInput() as message:
                    match message.WhichOneof("input"):
                        case "first_token" if len(message.first_token.token_ids) == 1:
                            return self._parts.first_token_of(message)
                        case "source_lost" | "new_source":
                            raise HandoffError("the prompt in this pool's memory was given up")
                        case other:
                            raise InvalidRequestError(
                                FieldViolation("input", f"{other} is not expected now")
                            )
                case event:
                    raise InternalError(
                        f"unexpected {type(event).__name__} before the request joined"
                    )
