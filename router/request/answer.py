"""The response stream of one request: output, messages, and the queue of unread messages.

`Output` turns tokens into ids, text up to a stop string, logprobs and usage. `Answer` sends them as
chunks and one finish. `ResponseQueue` joins the chunks for a client that is slower than its pool,
and ends the request of a client that does not read.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from protos import decode_pb2, generation_pb2, prefill_pb2, types_pb2
from router.request.timeline import Timeline
from router.text.detokenizer import Detokenizer, StopMatcher
from runtime.clock import Deadline, LoopClock
from runtime.errors import RequestAborted
from runtime.queue_reader import QueueReader

MAX_UNREAD = 64  # messages
MAX_JOINED = 256  # tokens per message


@dataclass(frozen=True)
class CachedTokens:
    """The tokens of a prompt that were not computed.

    Of `total`, the others were copied for this request: from another worker, from host memory, from
    disk and from a cache server.
    """

    total: int = 0
    pulled: int = 0
    host: int = 0
    disk: int = 0
    server: int = 0

    @classmethod
    def reported(
        cls, report: prefill_pb2.PrefillStarted | decode_pb2.DecodeLocal, *, at_most: int
    ) -> Self:
        """Return those that a worker reports, of a prompt of `at_most` tokens."""
        rest = total = min(report.cached_tokens, at_most)
        copied = []
        for reported in (
            report.pulled_tokens,
            report.host_tokens,
            report.disk_tokens,
            report.server_tokens,
        ):
            copied.append(min(reported, rest))
            rest -= copied[-1]
        return cls(total, *copied)

    @cached_property
    def copied(self) -> int:
        """Return how many of them were copied for this request."""
        return self.pulled + self.host + self.disk + self.server


class Output:
    """Output of one request so far. Every token passes through `add` exactly once, in order."""

    def __init__(
        self,
        engine: types_pb2.EngineRequest,
        stop_strings: Sequence[str],
        detokenizer: Detokenizer | None,
    ) -> None:
        """`detokenizer` is None if the client wants ids only."""
        self._num_prompt_tokens = len(engine.prompt_token_ids)
        self._min_tokens = engine.min_tokens
        self._stop_token_ids = frozenset(engine.stop_token_ids)
        self._text = None if detokenizer is None else (detokenizer, StopMatcher(stop_strings))
        self._num_scored = 1  # the first token of a prompt has no score
        self.num_tokens = 0
        self.cached = CachedTokens()
        self.stop_string: str | None = None  # the match that ended the request

    def add(self, tokens: types_pb2.TokenChunk) -> generation_pb2.GenerateResponse:
        """Return the chunk to send. If a stop string matched, the chunk ends with the token that
        completed it.
        """
        response = generation_pb2.GenerateResponse()
        chunk = response.chunk  # filled in place: assigning a submessage would copy it
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
        """Return the part of `scores` after the positions already passed; None if it is empty."""
        skipped = self._num_scored - scores.first_position
        if skipped >= len(scores.token_ids):
            return None
        self._num_scored = scores.first_position + len(scores.token_ids)
        return types_pb2.PromptLogprobs(
            first_position=scores.first_position + skipped,
            token_ids=scores.token_ids[skipped:],
            logprobs=scores.logprobs[skipped:],
        )

    def finish(self, *, is_aborted: bool = False) -> str:
        """Return the text held back, now that no token follows.

        A character that was cut off by an abort is left out.
        """
        if self._text is None or self.stop_string is not None:
            return ""
        detokenizer, stops = self._text
        text, self.stop_string = stops.feed("" if is_aborted else detokenizer.finish())
        return text if self.stop_string is not None else text + stops.finish()

    def usage(self) -> generation_pb2.Usage:
        usage = generation_pb2.Usage()
        self._count_into(usage)
        return usage

    def _count_into(self, usage: generation_pb2.Usage) -> None:
        usage.prompt_tokens = self._num_prompt_tokens
        usage.completion_tokens = self.num_tokens
        cached = self.cached
        usage.cached_tokens = cached.total
        if cached.copied:  # mostly not, and this is done for every chunk
            usage.pulled_tokens = cached.pulled
            usage.host_tokens = cached.host
            usage.disk_tokens = cached.disk
            usage.server_tokens = cached.server

    def _text_of(self, token_ids: Iterable[int]) -> tuple[str, int]:
        """Count tokens; return their text and their number up to the end of a stop string."""
        text = ""
        used = 0
        for token_id in token_ids:
            used += 1
            self.num_tokens += 1
            text += self._text_of_one(token_id)
            if self.stop_string is not None:
                break
        return text, used

    def _text_of_one(self, token_id: int) -> str:
        # A stop token can only be the last token. Like a stop string, it is not part of the text.
        if self._text is None or token_id in self._stop_token_ids:
            return ""
        detokenizer, stops = self._text
        text = detokenizer.add(token_id)
        if self.num_tokens < self._min_tokens:
            return text  # stop strings count from the first token that may be the last
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
    ) -> None:
        """`request_id` is the client's id, `index` the choice."""
        self._request_id = request_id
        self.index = index
        self._output = output
        self._responses = responses
        self.timeline = timeline
        # Identity of workers and prompt, sent with the first scores and with the first tokens.
        self.sampled_by = ""
        self._has_scores = self._has_tokens = False
        self.has_ended = False

    def cached(
        self, report: prefill_pb2.PrefillStarted | decode_pb2.DecodeLocal, *, at_most: int
    ) -> CachedTokens:
        """Record the tokens, of `at_most` in the prompt, that the worker to read it had cached."""
        self._output.cached = CachedTokens.reported(report, at_most=at_most)
        return self._output.cached

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the client has."""
        return self._output.num_tokens

    @property
    def usage(self) -> generation_pb2.Usage:
        return self._output.usage()

    @property
    def stopped(self) -> generation_pb2.GenerateFinish | None:
        """Return the finish of a response that matched a stop string, else None."""
        if self._output.stop_string is None:
            return None
        return generation_pb2.GenerateFinish(
            reason=types_pb2.FINISH_REASON_STOP, stop_string=self._output.stop_string
        )

    def tokens(self, tokens: types_pb2.TokenChunk) -> None:
        """Send tokens of the workers, in order."""
        response = self._output.add(tokens)
        chunk = response.chunk
        self.timeline.tokens(len(chunk.token_ids))
        if not self._has_tokens and chunk.token_ids:
            chunk.compatibility = self.sampled_by
            self._has_tokens = True
        self._send(response)

    @property
    def has_room(self) -> bool:
        """Return whether scores may be sent now."""
        return self._responses.has_room

    async def room(self) -> None:
        """Wait until scores may be sent.

        Raises:
            RequestAborted: the client does not read.
        """
        await self._responses.room()

    def scores(self, scores: types_pb2.PromptLogprobs) -> None:
        """Send prompt scores.

        A replacement prefill worker begins with scores that the client already has. They are
        identical and left out.
        """
        if unseen := self._output.unseen(scores):
            chunk = generation_pb2.GenerateChunk(prompt_logprobs=unseen, usage=self._output.usage())
            if not self._has_scores:
                chunk.compatibility = self.sampled_by
                self._has_scores = True
            self._send(generation_pb2.GenerateResponse(chunk=chunk))

    def finish(self, finish: generation_pb2.GenerateFinish) -> None:
        """Send the text held back, now that no token follows, and the finish with usage and timings."""
        is_aborted = finish.reason == types_pb2.FINISH_REASON_ABORTED
        if text := self._output.finish(is_aborted=is_aborted):
            chunk = generation_pb2.GenerateChunk(text=text, usage=self._output.usage())
            self._send(generation_pb2.GenerateResponse(chunk=chunk))
        finish = self.stopped or finish
        self.timeline.ended(
            types_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
        )
        finish.usage.CopyFrom(self._output.usage())
        finish.timings.CopyFrom(self.timeline.timings)
        self.has_ended = True
        self._send(generation_pb2.GenerateResponse(finish=finish))

    def _send(self, response: generation_pb2.GenerateResponse) -> None:
        response.request_id = self._request_id
        response.index = self.index
        self._responses.put(response)


class ResponseQueue:
    """Unread messages of one stream.

    Tokens that arrive while earlier ones of their choice are unread join the same message. So a
    slow client gets fewer and longer messages, and the queue is bounded by the token limits of its
    requests. A client that reads nothing for the stall limit is treated as gone. After the queue
    closes, all unread messages must be read within that limit, so that a slow trickle ends.
    """

    def __init__(self, stall_limit_s: float) -> None:
        self._stall_limit_s = stall_limit_s
        self._unread: deque[generation_pb2.GenerateResponse] = deque()
        # By choice: the unread message that further tokens may join.
        self._open_chunks: dict[int, generation_pb2.GenerateResponse] = {}
        self._loop = asyncio.get_running_loop()
        self._reader = QueueReader()
        self._was_read = asyncio.Event()
        self._waited_s = 0.0  # total wait for room
        self._read_at = 0.0  # loop time of the last read, or of the first message since empty
        self._deadline: Deadline | None = None  # by which a closed queue must be read

    def put(self, response: generation_pb2.GenerateResponse) -> None:
        """Queue a message without waiting.

        Raises:
            RequestAborted: the client has read nothing for the stall limit.
        """
        index = response.index
        is_tokens = bool(response.chunk.token_ids)
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
        else:  # text or scores on their own, or the finish
            self._open_chunks.pop(index, None)
        self._reader.wake()

    @property
    def has_room(self) -> bool:
        """Return whether fewer than `MAX_UNREAD` messages are unread."""
        return len(self._unread) < MAX_UNREAD

    async def room(self) -> None:
        """Wait until fewer than `MAX_UNREAD` messages are unread.

        The stall limit covers all waits together: a worker holds the prompt's memory meanwhile,
        even if the client reads slowly.

        Raises:
            RequestAborted: the waits have taken the stall limit.
        """
        if self.has_room:
            return
        began_at = self._loop.time()
        try:
            async with asyncio.timeout(self._stall_limit_s - self._waited_s):
                while not self.has_room:
                    self._was_read.clear()
                    await self._was_read.wait()
        except TimeoutError:
            raise RequestAborted(
                f"the client has kept a worker waiting for {self._stall_limit_s:g} s"
            ) from None
        finally:
            self._waited_s += self._loop.time() - began_at

    def close(self) -> None:
        """Close the queue: no message will be put."""
        if self._deadline is None:
            self._deadline = Deadline.after(LoopClock(self._loop), self._stall_limit_s)
        self._reader.wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> generation_pb2.GenerateResponse:
        """Return the next message, until the queue is closed and empty.

        Raises:
            RequestAborted: messages were not read within the stall limit after the close.
        """
        while not self._unread:
            if self._deadline is not None:
                raise StopAsyncIteration
            await self._reader.wait()
        if self._deadline is not None and self._deadline.is_over:
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


def _join(chunk: generation_pb2.GenerateChunk, more: generation_pb2.GenerateChunk) -> bool:
    """Append `more` to an unread chunk of the same choice; return False if it has no room."""
    if len(chunk.token_ids) + len(more.token_ids) > MAX_JOINED:
        return False
    chunk.token_ids.extend(more.token_ids)
    chunk.logprobs.extend(more.logprobs)
    chunk.text += more.text
    chunk.usage.CopyFrom(more.usage)
    return True
