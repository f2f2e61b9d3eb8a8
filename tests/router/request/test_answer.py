"""Tokens to client output: stop strings, stop tokens, minimum lengths; and the queue between a
request and its client: order, a bound, and an end."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from protos import generation_pb2, prefill_pb2, types_pb2
from router.request.answer import (
    MAX_JOINED,
    MAX_UNREAD,
    Answer,
    CachedTokens,
    Output,
    ResponseQueue,
)
from router.request.timeline import Timeline
from router.text.detokenizer import Detokenizers
from runtime.clock import SystemClock
from runtime.errors import RequestAborted
from runtime.observe.metrics.router import RouterMetrics
from tests.router.harness import byte_level_tokenizer

DETOKENIZERS = Detokenizers(byte_level_tokenizer())
FINISH = generation_pb2.GenerateResponse(finish=generation_pb2.GenerateFinish())


def ids(text: str) -> list[int]:
    """Return one token per character."""
    return [
        token_id for character in text for token_id in byte_level_tokenizer().encode(character).ids
    ]


def run(
    text: str, *, stops: tuple[str, ...] = (), chunk: int = 1, **engine: object
) -> tuple[str, list[int], Output]:
    """Return (text, ids, the output) for these tokens in chunks."""
    request = types_pb2.EngineRequest(prompt_token_ids=[1, 2], **engine)  # type: ignore[arg-type]
    output = Output(request, stops, DETOKENIZERS.new((1, 2)))
    given_text, tokens = "", ids(text)
    given_ids: list[int] = []
    for start in range(0, len(tokens), chunk):
        part = output.add(types_pb2.TokenChunk(token_ids=tokens[start : start + chunk])).chunk
        given_text += part.text
        given_ids += part.token_ids
        if output.stop_string is not None:
            return given_text, given_ids, output
    return given_text + output.finish(), given_ids, output


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_a_stop_string_cuts_text_and_ids_for_any_chunks(chunk: int) -> None:
    text, token_ids, output = run("one two three", stops=("two", "three"), chunk=chunk)
    assert (text, output.stop_string) == ("one ", "two")
    assert token_ids == ids("one two")
    assert output.usage() == generation_pb2.Usage(prompt_tokens=2, completion_tokens=7)


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, "a"), (2, "a"), (3, "abca"), (5, "abca"), (6, "abcabc")]
)
def test_stop_strings_count_from_the_shortest_allowed_length(
    min_tokens: int, expected: str
) -> None:
    assert run("abcabc", stops=("b",), min_tokens=min_tokens)[0] == expected


def test_a_stop_token_is_sent_but_is_no_text() -> None:
    text, token_ids, _ = run("ab!", stop_token_ids=ids("!"))
    assert text == "ab"
    assert token_ids == ids("ab!")


def test_a_stop_string_can_end_in_a_broken_character() -> None:
    """What is left of a character when the tokens end is text too."""
    output = Output(types_pb2.EngineRequest(), ("\ufffd",), DETOKENIZERS.new((1, 2)))
    assert output.add(types_pb2.TokenChunk(token_ids=ids("é")[:1])).chunk.text == ""
    assert output.finish() == ""
    assert output.stop_string == "\ufffd"


@pytest.mark.parametrize(
    ("reason", "sent"),
    [
        (types_pb2.FINISH_REASON_LENGTH, "a!\ufffd"),
        (types_pb2.FINISH_REASON_ABORTED, "a!"),
    ],
)
async def test_an_aborted_response_has_no_part_of_a_character(
    reason: types_pb2.FinishReason, sent: str
) -> None:
    """Held back are a beginning of a stop string, and then half a character."""
    output = Output(types_pb2.EngineRequest(), ("!\u00e9?",), DETOKENIZERS.new((1, 2)))
    responses = ResponseQueue(60.0)
    timeline = Timeline(SystemClock(), RouterMetrics.create(CollectorRegistry()))
    answer = Answer("r", 0, output, responses, timeline)
    answer.tokens(types_pb2.TokenChunk(token_ids=[*ids("a!"), ids("é")[0]]))
    answer.finish(generation_pb2.GenerateFinish(reason=reason))
    responses.close()
    found = [response async for response in responses]
    assert "".join(response.chunk.text for response in found) == sent
    assert found[-1].finish.reason == reason


def chunk(*token_ids: int, index: int = 0) -> generation_pb2.GenerateResponse:
    usage = generation_pb2.Usage(completion_tokens=token_ids[-1] + 1)
    return generation_pb2.GenerateResponse(
        index=index,
        chunk=generation_pb2.GenerateChunk(
            token_ids=token_ids,
            text="".join(f"<{i}>" for i in token_ids),
            usage=usage,
            logprobs=[types_pb2.TokenLogprobs(logprob=-i) for i in token_ids],
        ),
    )


async def test_a_client_that_keeps_up_gets_a_message_for_each_chunk_in_order() -> None:
    responses, count = ResponseQueue(stall_limit_s=5), 200

    async def fill() -> None:
        for i in range(count):
            responses.put(chunk(i))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        responses.put(FINISH)
        responses.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(fill())
        out = [response async for response in responses]
    assert out == [*(chunk(i) for i in range(count)), FINISH]


async def test_tokens_that_come_while_others_are_unread_join_them() -> None:
    """Each choice separately; text without tokens, which comes right before a finish, stays
    separate, too."""
    responses = ResponseQueue(stall_limit_s=5)
    text = generation_pb2.GenerateResponse(chunk=generation_pb2.GenerateChunk(text="rest"))
    for i in range(3):
        responses.put(chunk(i))
        responses.put(chunk(10 + i, index=1))
    responses.put(text)
    responses.put(FINISH)
    responses.close()
    out = [response async for response in responses]
    assert out == [chunk(0, 1, 2), chunk(10, 11, 12, index=1), text, FINISH]


async def test_a_joined_message_has_a_bound() -> None:
    responses, count = ResponseQueue(stall_limit_s=60), 3 * MAX_JOINED + 1
    for i in range(count):
        responses.put(chunk(i))
    responses.close()
    out = [response async for response in responses]
    assert [len(response.chunk.token_ids) for response in out] == [MAX_JOINED] * 3 + [1]
    assert [i for response in out for i in response.chunk.token_ids] == list(range(count))


async def test_nothing_joins_a_message_that_was_read() -> None:
    responses = ResponseQueue(stall_limit_s=5)
    responses.put(chunk(0))
    read = await anext(responses)
    responses.put(chunk(1))
    assert (read, await anext(responses)) == (chunk(0), chunk(1))


async def test_a_client_that_does_not_read_is_noticed_and_a_finish_still_fits() -> None:
    responses = ResponseQueue(stall_limit_s=0.05)
    responses.put(chunk(0))
    await asyncio.sleep(0.1)
    with pytest.raises(RequestAborted, match=r"read nothing for 0\.05 s"):
        responses.put(chunk(1))
    responses.put(FINISH)
    responses.close()
    assert [response async for response in responses][-1] == FINISH


async def test_a_worker_waits_for_an_unread_queue_up_to_the_stall_limit() -> None:
    responses = ResponseQueue(stall_limit_s=1.0)
    for i in range(MAX_UNREAD):
        await responses.room()
        responses.put(chunk(i, index=i))
    with pytest.raises(RequestAborted, match="kept a worker waiting for 1 s"):
        await responses.room()
    await anext(responses)
    await responses.room()


async def test_waits_for_a_client_that_reads_a_little_are_one_wait() -> None:
    """The client reads each message well within the limit, but the waiting ones hold a worker's
    memory."""
    responses, num_read = ResponseQueue(stall_limit_s=1.0), 0
    scores = generation_pb2.GenerateResponse(chunk=generation_pb2.GenerateChunk(text="scores"))
    for _ in range(MAX_UNREAD):
        responses.put(scores)

    async def read_slowly() -> None:
        nonlocal num_read
        async for _ in responses:
            num_read += 1
            await asyncio.sleep(0.1)

    async def fill() -> None:
        while True:
            await responses.room()
            responses.put(scores)

    reading = asyncio.create_task(read_slowly())
    async with asyncio.timeout(30):
        with pytest.raises(RequestAborted, match="kept a worker waiting for 1 s"):
            await fill()
    reading.cancel()
    assert 1 < num_read <= 11


async def test_a_slow_reader_gets_the_stall_limit_for_the_end_of_its_stream() -> None:
    responses = ResponseQueue(stall_limit_s=1.0)
    for i in range(MAX_UNREAD):
        responses.put(chunk(i, index=i))
    responses.close()
    read: list[generation_pb2.GenerateResponse] = []

    async def trickle() -> None:
        async for response in responses:
            read.append(response)
            await asyncio.sleep(0.2)

    with pytest.raises(RequestAborted, match="not read the end of its stream"):
        await trickle()
    assert 0 < len(read) < MAX_UNREAD


@pytest.mark.parametrize(
    ("cached", "pulled", "host", "disk", "server", "expected"),
    [
        (48, 16, 0, 16, 0, CachedTokens(48, 16, 0, 16)),
        (90, 10, 20, 30, 30, CachedTokens(90, 10, 20, 30, 30)),
        (400, 300, 1, 90, 7, CachedTokens(100, 100)),  # of a resumed response more was cached
        (32, 40, 0, 7, 3, CachedTokens(32, 32)),
        (32, 16, 0, 40, 3, CachedTokens(32, 16, 0, 16)),
        (32, 16, 10, 0, 40, CachedTokens(32, 16, 10, 0, 6)),
    ],
)
def test_a_report_never_adds_up_to_more_than_the_prompt(
    cached: int, pulled: int, host: int, disk: int, server: int, expected: CachedTokens
) -> None:
    started = prefill_pb2.PrefillStarted(
        cached_tokens=cached,
        pulled_tokens=pulled,
        host_tokens=host,
        disk_tokens=disk,
        server_tokens=server,
    )
    found = CachedTokens.reported(started, at_most=100)
    assert found == expected
    assert found.copied <= found.total
