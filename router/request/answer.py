"""What a client gets of one request: the output made of tokens, the messages that carry it, and the
queue they wait in.

`Output` turns tokens into ids, text up to a stop string, logprobs and usage; `Answer` sends them as
chunks and one finish; `ResponseQueue` joins the chunks of a client that is slower than its pool,
and ends the request of one that does not read. Of an answer that another router began, the tokens
that the client has are checked before any work and fed to the output, so that what follows is what
would have followed.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Self

from protos import generation_pb2, types_pb2
from router.request.service_times import Timeline
from router.text.detokenise import Detokeniser, StopMatcher
from router.text.model_facts import ModelLimits
from runtime.errors import FieldViolation, InvalidRequestError, RequestAborted

MAX_UNREAD = 64  # messages
MAX_JOINED = 256  # tokens of one message
MAX_COMPATIBILITY_CHARS = 256
FED_AT_ONCE = 256  # tokens; other requests go on between two lots


class Output:
    """One request's output so far. Every token passes through `add` exactly once, in order."""

    def __init__(
        self,
        engine: types_pb2.EngineRequest,
        stop_strings: Sequence[str],
        detokeniser: Detokeniser | None,
    ) -> None:
        """`detokeniser` is None when the client gets ids only."""
        self._num_prompt_tokens = len(engine.prompt_token_ids)
        self._min_tokens = engine.min_tokens
        self._stop_token_ids = frozenset(engine.stop_token_ids)
        self._text = None if detokeniser is None else (detokeniser, StopMatcher(stop_strings))
        self._num_scored = 1  # the first token of a prompt has no score
        self.num_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, as the latest prefill worker counted them
        self.stop_string: str | None = None  # the one that ended the request

    def add(self, tokens: types_pb2.TokenChunk) -> generation_pb2.GenerateResponse:
        """The chunk to send. If a stop string matched, it ends with the token that completed it."""
        response = generation_pb2.GenerateResponse()
        chunk = response.chunk  # filled in place: a message that is put into another one is copied
        used = len(tokens.token_ids)
        if self._text is None:
            self.num_tokens += used
        else:
            chunk.text, used = self._text_of(tokens.token_ids)
        if used == len(tokens.token_ids):
            chunk.token_ids.MergeFrom(tokens.token_ids)
            chunk.logprobs.MergeFrom(tokens.logprobs)
        else:
            chunk.token_ids.extend(tokens.token_ids[:used])
            chunk.logprobs.extend(tokens.logprobs[:used])
        self._count_into(chunk.usage)
        return response

    def unseen(self, scores: types_pb2.PromptLogprobs) -> types_pb2.PromptLogprobs | None:
        """What of `scores` follows the positions that came before; None if nothing does."""
        skipped = self._num_scored - scores.first_position
        if skipped >= len(scores.token_ids):
            return None
        self._num_scored = scores.first_position + len(scores.token_ids)
        return types_pb2.PromptLogprobs(
            first_position=scores.first_position + skipped,
            token_ids=scores.token_ids[skipped:],
            logprobs=scores.logprobs[skipped:],
        )

    def finish(self) -> str:
        """Text that was held back, now that no token follows."""
        if self._text is None or self.stop_string is not None:
            return ""
        detokeniser, stops = self._text
        text, self.stop_string = stops.feed(detokeniser.finish())
        return text if self.stop_string is not None else text + stops.finish()

    def usage(self) -> generation_pb2.Usage:
        usage = generation_pb2.Usage()
        self._count_into(usage)
        return usage

    def _count_into(self, usage: generation_pb2.Usage) -> None:
        usage.prompt_tokens, usage.completion_tokens = self._num_prompt_tokens, self.num_tokens
        usage.cached_tokens = self.num_cached_tokens

    def _text_of(self, token_ids: Iterable[int]) -> tuple[str, int]:
        """Counts them; their text, and how many of them there are up to the end of a stop
        string."""
        text, used = "", 0
        for token_id in token_ids:
            used += 1
            self.num_tokens += 1
            text += self._text_of_one(token_id)
            if self.stop_string is not None:
                break
        return text, used

    def _text_of_one(self, token_id: int) -> str:
        # A stop token can only be drawn as the last one; like a stop string, it is not part of the
        # text.
        if self._text is None or token_id in self._stop_token_ids:
            return ""
        detokeniser, stops = self._text
        text = detokeniser.add(token_id)
        if self.num_tokens < self._min_tokens:
            return text  # stop strings count from the token that may be the last
        text, self.stop_string = stops.feed(text)
        return text


class Answer:
    """Chunks, then exactly one finish, of one choice of a request."""

    def __init__(
        self,
        request_id: str,
        index: int,
        output: Output,
        responses: "ResponseQueue",
        timeline: Timeline,
        resumed: Sequence[int] = (),
    ) -> None:
        """`request_id` is the client's, `index` that of the choice. `resumed`: what the client has
        already, and `output` was fed."""
        self._request_id = request_id
        self._index = index
        self._output = output
        self._responses = responses
        self.timeline = timeline
        self.token_ids = list(resumed)  # all that the client has
        self.drawn_by = ""  # workers, for which prompt; the client gets it with the first tokens
        self._is_named = False
        self.has_ended = False

    def cached(self, num_tokens: int) -> None:
        """So many tokens of the prompt need not be computed, as the latest prefill worker says."""
        self._output.num_cached_tokens = num_tokens

    @property
    def stopped(self) -> generation_pb2.GenerateFinish | None:
        """The finish of an answer that came upon a stop string; None while it may go on."""
        if self._output.stop_string is None:
            return None
        return generation_pb2.GenerateFinish(
            reason=types_pb2.FINISH_REASON_STOP, stop_string=self._output.stop_string
        )

    def tokens(self, tokens: types_pb2.TokenChunk) -> None:
        """What the workers drew, in order."""
        response = self._output.add(tokens)
        chunk = response.chunk
        self.token_ids.extend(chunk.token_ids)
        self.timeline.tokens(len(chunk.token_ids))
        if not self._is_named and chunk.token_ids:
            chunk.compatibility, self._is_named = self.drawn_by, True
        self._send(response)

    async def scores(self, scores: types_pb2.PromptLogprobs) -> None:
        """A prefill worker that takes over begins with what the client has already: the same bits,
        so they are left out."""
        if unseen := self._output.unseen(scores):
            await self._responses.room()
            chunk = generation_pb2.GenerateChunk(prompt_logprobs=unseen, usage=self._output.usage())
            self._send(generation_pb2.GenerateResponse(chunk=chunk))

    def rest(self) -> None:
        """Text that was held back, now that no token follows."""
        if text := self._output.finish():
            chunk = generation_pb2.GenerateChunk(text=text, usage=self._output.usage())
            self._send(generation_pb2.GenerateResponse(chunk=chunk))

    def finish(self, finish: generation_pb2.GenerateFinish) -> None:
        """The end, with what the answer came to and how long its parts took."""
        self.timeline.ended(
            types_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
        )
        finish.usage.CopyFrom(self._output.usage())
        finish.timings.CopyFrom(self.timeline.timings)
        self.has_ended = True
        self._send(generation_pb2.GenerateResponse(finish=finish))

    def _send(self, response: generation_pb2.GenerateResponse) -> None:
        response.request_id, response.index = self._request_id, self._index
        self._responses.put(response)


class ResponseQueue:
    """Messages of one stream. Tokens that come while earlier ones of their choice are unread join
    these in one message, so that a slow client gets fewer and longer ones, and what waits is
    bounded by what its requests may draw. A client that reads nothing for the stall limit has left.
    What is unread when the queue closes has that limit to be read: all of it, so that a trickle
    does not go on."""

    def __init__(self, stall_limit_s: float) -> None:
        self._stall_limit_s = stall_limit_s
        self._unread: deque[generation_pb2.GenerateResponse] = deque()
        self._open_chunks: dict[
            int, generation_pb2.GenerateResponse
        ] = {}  # by choice: unread, and more may join
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None  # that waits for a message
        self._was_read = asyncio.Event()
        self._waited_s = 0.0  # for room
        self._read_at = (
            0.0  # loop time of the last reading, or of the first message after all were read
        )
        self._ends_at: float | None = None  # loop time, of a queue that is closed

    def put(self, response: generation_pb2.GenerateResponse) -> None:
        """Never waits. Raises RequestAborted if the client has read nothing for the stall limit."""
        index, is_tokens = response.index, bool(response.chunk.token_ids)
        if not self._unread:
            self._read_at = self._loop.time()
        elif self._is_stalled and not response.HasField("finish"):
            raise RequestAborted(f"the client has read nothing for {self._stall_limit_s:g} s")
        elif (
            is_tokens
            and index in self._open_chunks
            and _join(self._open_chunks[index].chunk, response.chunk)
        ):
            return
        self._unread.append(response)
        if is_tokens:
            self._open_chunks[index] = response
        else:  # text or scores of their own, or the finish
            self._open_chunks.pop(index, None)
        self._wake()

    async def room(self) -> None:
        """Until fewer than `MAX_UNREAD` messages are unread. Raises RequestAborted once that has
        taken the stall limit, all waits together: a worker holds the prompt's memory meanwhile,
        also for a client that reads a little."""
        if len(self._unread) < MAX_UNREAD:
            return
        began_at = self._loop.time()
        try:
            async with asyncio.timeout(self._stall_limit_s - self._waited_s):
                while len(self._unread) >= MAX_UNREAD:
                    self._was_read.clear()
                    await self._was_read.wait()
        except TimeoutError:
            raise RequestAborted(
                f"the client has kept a worker waiting for {self._stall_limit_s:g} s"
            ) from None
        finally:
            self._waited_s += self._loop.time() - began_at

    def close(self) -> None:
        """Nothing more will be put."""
        if self._ends_at is None:
            self._ends_at = self._loop.time() + self._stall_limit_s
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> generation_pb2.GenerateResponse:
        """The next message, until the queue is closed and empty. Raises RequestAborted for messages
        that were not read within the stall limit from the closing."""
        while not self._unread:
            if self._ends_at is not None:
                raise StopAsyncIteration
            self._reader = self._loop.create_future()
            await self._reader
        if self._ends_at is not None and self._loop.time() > self._ends_at:
            raise RequestAborted(
                f"the client has not read the end of its stream for {self._stall_limit_s:g} s"
            )
        response = self._unread.popleft()
        if self._open_chunks.get(response.index) is response:
            del self._open_chunks[response.index]
        if self._unread:
            self._read_at = self._loop.time()
        self._was_read.set()
        return response

    @property
    def _is_stalled(self) -> bool:
        return self._loop.time() - self._read_at > self._stall_limit_s

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _join(chunk: generation_pb2.GenerateChunk, more: generation_pb2.GenerateChunk) -> bool:
    """Whether it has room for more tokens of the same choice."""
    if len(chunk.token_ids) + len(more.token_ids) > MAX_JOINED:
        return False
    chunk.token_ids.extend(more.token_ids)
    chunk.logprobs.extend(more.logprobs)
    chunk.text += more.text
    chunk.usage.CopyFrom(more.usage)
    return True


def resumed_violations(
    request: generation_pb2.GenerateRequest, facts: ModelLimits
) -> Iterable[FieldViolation]:
    """What is wrong with `resumed` as far as that can be seen without the prompt."""
    num_choices = request.n if request.HasField("n") else 1
    if len(request.resumed) > num_choices:
        yield FieldViolation(
            "resumed",
            f"has {len(request.resumed)} entries, the limit is one per choice: {num_choices}",
        )
        return
    if len(request.resumed_from) > len(request.resumed):
        yield FieldViolation(
            "resumed_from",
            f"has {len(request.resumed_from)} entries, the limit is one per entry of "
            f"resumed: {len(request.resumed)}",
        )
    for index, name in enumerate(request.resumed_from):
        if len(name) > MAX_COMPATIBILITY_CHARS:
            yield FieldViolation(
                f"resumed_from[{index}]",
                f"has {len(name)} characters, the limit is {MAX_COMPATIBILITY_CHARS}",
            )
    for index, choice in enumerate(request.resumed):
        if len(choice.ids) > facts.max_context_tokens:
            yield FieldViolation(
                f"resumed[{index}].ids",
                f"has {len(choice.ids)} tokens, the maximum context length "
                f"is {facts.max_context_tokens}",
            )
        elif choice.ids and max(choice.ids) >= facts.vocab_size:
            place, token_id = next(
                (i, token_id)
                for i, token_id in enumerate(choice.ids)
                if token_id >= facts.vocab_size
            )
            yield FieldViolation(
                f"resumed[{index}].ids[{place}]",
                f"{token_id} is not in the vocabulary of {facts.vocab_size} tokens",
            )


def too_many_resumed(
    request: generation_pb2.GenerateRequest, max_tokens: int
) -> Iterable[FieldViolation]:
    """More tokens than the answer may have."""
    for index, choice in enumerate(request.resumed):
        if len(choice.ids) > max_tokens:
            yield FieldViolation(
                f"resumed[{index}].ids",
                f"has {len(choice.ids)} tokens, more than the {max_tokens} "
                "that the answer may have",
            )


async def feed(
    output: Output, token_ids: Sequence[int], engine: types_pb2.EngineRequest, index: int
) -> None:
    """Let the output of choice `index` know what its client has.

    Raises:
        InvalidRequestError: the answer ends before the last of these tokens.
    """
    for start in range(0, len(token_ids), FED_AT_ONCE):
        output.add(types_pb2.TokenChunk(token_ids=token_ids[start : start + FED_AT_ONCE]))
        if output.stop_string is not None:
            break
        await asyncio.sleep(0)
    stops = frozenset(engine.stop_token_ids)
    stopped = (place + 1 for place, token_id in enumerate(token_ids) if token_id in stops)
    length = min(output.num_tokens, next(stopped, len(token_ids)))
    if length < len(token_ids):
        raise InvalidRequestError(
            FieldViolation(
                f"resumed[{index}].ids[{length}]",
                "follows the end of the answer: a stop string or token",
            )
        )


def finish_of(
    token_ids: Sequence[int], engine: types_pb2.EngineRequest
) -> generation_pb2.GenerateFinish | None:
    """How an answer of these tokens has ended, stop strings aside; None while it goes on."""
    if token_ids and token_ids[-1] in engine.stop_token_ids:
        return generation_pb2.GenerateFinish(
            reason=types_pb2.FINISH_REASON_STOP, stop_token_id=token_ids[-1]
        )
    if len(token_ids) >= engine.max_tokens:
        return generation_pb2.GenerateFinish(reason=types_pb2.FINISH_REASON_LENGTH)
    return None
