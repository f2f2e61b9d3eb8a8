"""One request's side towards its client: what it was told so far, and how it is told more."""

from collections.abc import Awaitable, Callable, Sequence

from protos import generation_pb2, types_pb2
from router.request.output import Output
from router.request.timeline import Timeline

Emit = Callable[[generation_pb2.GenerateResponse], Awaitable[None]]


class Answer:
    """Chunks, then exactly one finish. `emit` may wait for chunks; it must take a finish at once."""

    def __init__(self, request_id: str, output: Output, emit: Emit, timeline: Timeline,
                 resumed: Sequence[int] = ()) -> None:
        """`resumed`: what the client has already, and `output` knows."""
        self._request_id = request_id
        self._output = output
        self._emit = emit
        self._timeline = timeline
        self.token_ids = list(resumed)  # all that the client has
        self.has_ended = False

    @property
    def stopped(self) -> generation_pb2.GenerateFinish | None:
        """The finish of an answer that came upon a stop string; None while it may go on."""
        if self._output.stop_string is None:
            return None
        return generation_pb2.GenerateFinish(reason=types_pb2.FINISH_REASON_STOP, stop_string=self._output.stop_string)

    async def tokens(self, tokens: types_pb2.TokenChunk) -> None:
        """What the workers drew, in order."""
        chunk = self._output.add(tokens)
        self.token_ids.extend(chunk.token_ids)
        self._timeline.tokens(len(chunk.token_ids))
        await self._emit(generation_pb2.GenerateResponse(request_id=self._request_id, chunk=chunk))

    async def scores(self, scores: types_pb2.PromptLogprobs) -> None:
        """A prefill worker that takes over begins with what the client has already: the same bits, so they are left
        out."""
        if unseen := self._output.unseen(scores):
            chunk = generation_pb2.GenerateChunk(prompt_logprobs=unseen, usage=self._output.usage())
            await self._emit(generation_pb2.GenerateResponse(request_id=self._request_id, chunk=chunk))

    async def rest(self) -> None:
        """Text that was held back, now that no token follows."""
        if text := self._output.finish():
            chunk = generation_pb2.GenerateChunk(text=text, usage=self._output.usage())
            await self._emit(generation_pb2.GenerateResponse(request_id=self._request_id, chunk=chunk))

    async def finish(self, finish: generation_pb2.GenerateFinish) -> None:
        """The end, with what the answer came to and how long its parts took."""
        self._timeline.ended(types_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower())
        finish.usage.CopyFrom(self._output.usage())
        finish.timings.CopyFrom(self._timeline.timings)
        self.has_ended = True
        await self._emit(generation_pb2.GenerateResponse(request_id=self._request_id, finish=finish))
