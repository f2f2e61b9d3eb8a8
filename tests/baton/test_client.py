import asyncio
import re
import threading
from collections.abc import AsyncIterator

import grpc
import pytest

from baton import wire
from baton.client import AsyncBatonClient, BatonClient
from baton.retry import NO_RETRY
from baton.values import (
    ChatMessage,
    Chunk,
    Finish,
    FinishReason,
    Query,
    Sampling,
    Stop,
    StructuredOutput,
    Timings,
    ToolCall,
    Usage,
)
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc, types_pb2
from runtime import errors
from tests.support.router.generation import Context, EchoGeneration, serve_echo


@pytest.fixture
async def echo() -> AsyncIterator[tuple[EchoGeneration, str]]:
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer)
    yield servicer, address
    await server.drain(grace_s=0)


async def happened(event: asyncio.Event) -> None:
    """Wait for less than the minute that a hanging prompt takes."""
    async with asyncio.timeout(30):
        await event.wait()


async def test_events_become_values(echo: tuple[EchoGeneration, str]) -> None:
    async with AsyncBatonClient(echo[1]) as client:
        events = [event async for event in client.generate(Query("one two", request_id="r1"))]
    assert events == [
        Chunk("r1", (0,), "one ", (), Usage(2, 1)),
        Chunk("r1", (1,), "two ", (), Usage(2, 2)),
        Finish(
            "r1",
            FinishReason.STOP,
            None,
            7,
            Usage(2, 2),
            Timings(prefill_s=0.25, total_s=0.5, transfer_exposed_s=0.0),
        ),
    ]


async def test_sync_client_raises_the_same_errors(echo: tuple[EchoGeneration, str]) -> None:
    def talk() -> tuple[str, str, tuple[str, ...], int]:
        with BatonClient(echo[1]) as client:
            return (
                client.complete(Query("one two")).text,
                client.model_info().model,
                client.cluster_status().workers[0].stages,
                client.load().prefill_workers,
            )

    assert await asyncio.to_thread(talk) == ("one two ", "echo", ("0-4", "4-8"), 3)


async def test_absent_and_zero_differ_on_the_wire(echo: tuple[EchoGeneration, str]) -> None:
    query = Query(
        (4, 5),
        Sampling(temperature=0.0, logit_bias={3: -1.0}),
        Stop(max_tokens=2, strings=("x",)),
        num_top_logprobs=0,
        priority=-1,
        skip_text=True,
        speculate=False,
    )
    async with AsyncBatonClient(echo[1]) as client:
        await client.complete(query)
    assert echo[0].requests == [
        pb.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=[4, 5]),
            sampling=types_pb2.SamplingParams(temperature=0.0, logit_bias={3: -1.0}),
            stop=types_pb2.StopConditions(max_tokens=2, stop_strings=["x"]),
            num_top_logprobs=0,
            priority=-1,
            skip_text=True,
            speculate=False,
        )
    ]
    assert not echo[0].requests[0].sampling.HasField("top_p")
    assert not wire.request_of(Query((4, 5))).HasField("speculate")


async def test_choices_and_grammars_on_the_wire(echo: tuple[EchoGeneration, str]) -> None:
    query = Query(
        (4,),
        Sampling(seed=3),
        n=2,
        num_prompt_logprobs=0,
        structured_output=StructuredOutput(regex="a+"),
        speculate=False,
    )
    async with AsyncBatonClient(echo[1]) as client:
        (only,) = await client.choices(query)
        assert only.finish.index == 0
        with pytest.raises(errors.InvalidRequestError, match="not both"):
            await client.complete(Query((4,), structured_output=StructuredOutput("{}", "a")))
        assert (await client.load()).prefill_workers == 3
    assert echo[0].requests == [
        pb.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=[4]),
            sampling=types_pb2.SamplingParams(seed=3),
            stop=types_pb2.StopConditions(),
            n=2,
            num_prompt_logprobs=0,
            structured_output=types_pb2.StructuredOutput(regex="a+"),
            speculate=False,
        )
    ]


async def test_chat_prompt(echo: tuple[EchoGeneration, str]) -> None:
    async with AsyncBatonClient(echo[1]) as client:
        answer = await client.complete(Query((ChatMessage("user", "hello"),)))
    assert answer.text == "hello "


async def test_a_chat_has_all_that_openais_api_has(echo: tuple[EchoGeneration, str]) -> None:
    messages = (
        ChatMessage("system", ("be", "brief")),
        ChatMessage("user", "", name="Ada"),
        ChatMessage("assistant", None, "why not", (ToolCall("f", '{"a": 1}', "c1"),)),
        ChatMessage("tool", "42", tool_call_id="c1"),
    )
    query = Query(
        messages,
        tools=({"type": "function", "function": {"name": "ö"}},),
        template_arguments={"enable_thinking": False},
        continue_final_message=True,
    )
    async with AsyncBatonClient(echo[1]) as client:
        await client.complete(query)
    assert echo[0].requests[0].chat == pb.ChatMessages(
        messages=[
            pb.ChatMessage(
                role="system",
                content_parts=[pb.ContentPart(text="be"), pb.ContentPart(text="brief")],
            ),
            pb.ChatMessage(role="user", content="", name="Ada"),
            pb.ChatMessage(
                role="assistant",
                reasoning_content="why not",
                tool_calls=[pb.ToolCall(id="c1", name="f", arguments='{"a": 1}')],
            ),
            pb.ChatMessage(role="tool", content="42", tool_call_id="c1"),
        ],
        tools=['{"type": "function", "function": {"name": "ö"}}'],
        template_arguments='{"enable_thinking": false}',
        continue_final_message=True,
    )


async def test_field_violations_survive(echo: tuple[EchoGeneration, str]) -> None:
    async with AsyncBatonClient(echo[1], retry=NO_RETRY) as client:
        with pytest.raises(errors.InvalidRequestError) as caught:
            await client.complete(Query("x", Sampling(temperature=-1)))
        assert caught.value.violations[0].field == "sampling.temperature"
        with pytest.raises(errors.CapacityError) as full:
            await client.complete(Query("full"))
    assert full.value.retry_after_s == 2.5


@pytest.mark.parametrize(
    ("query", "field", "says"),
    [
        (Query("x", stop=Stop(max_tokens=-1)), "stop.max_tokens", "from 0 to 2^32 - 1: .*-1"),
        (
            Query("x", stop=Stop(token_ids=(1, -2))),
            "stop.stop_token_ids",
            "from 0 to 2^32 - 1: .*-2",
        ),
        (
            Query("x", Sampling(seed=2**64)),
            "sampling.seed",
            "from 0 to 2^64 - 1: .*18446744073709551616",
        ),
        (Query("x", Sampling(logit_bias={-1: 0.5})), "sampling.logit_bias", "-1"),
        (Query("x", num_top_logprobs=-1), "num_top_logprobs", "from 0 to 2^32 - 1: .*-1"),
        (Query("x", priority=2**31), "priority", "from -2^31 to 2^31 - 1: .*2147483648"),
        (Query((1, -3)), "token_ids.ids", "from 0 to 2^32 - 1: .*-3"),
        (Query("\ud800"), "text", "surrogates"),
        (
            Query((ChatMessage("user", "hello"), ChatMessage("user", "\ud800"))),
            "chat.messages[1].content",
            "surrogates",
        ),
        (Query((1, ChatMessage("user", "hello"))), "prompt", "not both"),  # type: ignore[arg-type]
        (Query("x", stop=Stop(strings="END")), "stop.stop_strings", "must be a list, got str"),  # type: ignore[arg-type]
        (Query("x", resumed_from="ab"), "resumed_from", "must be a list, got str"),  # type: ignore[arg-type]
        (Query(b"abc"), "token_ids.ids", "must be a list, got bytes"),  # type: ignore[arg-type]
        (Query(None), "prompt", "missing"),  # type: ignore[arg-type]
        (Query((ChatMessage("user", None),)), "chat.messages[0].content", "missing"),
        (
            Query((ChatMessage("user", "a"),), tools=({"a": b"b"},)),
            "chat.tools[0]",
            "bytes is not JSON",
        ),
        (Query((ChatMessage("user", ("a", 1)),)), "chat.messages[0].content_parts[1].text", "type"),  # type: ignore[arg-type]
        (
            Query("x", template_arguments={"a": 1}),
            "prompt",
            "must be chat messages if tools, template arguments",
        ),
        (Query((1, 2.5)), "token_ids.ids", "2.5|float"),  # type: ignore[arg-type]
        (Query("x", retention_s=3601.0), "retention_s", "between 0 and 3600, got 3601"),
        (Query("x", retention_s=float("nan")), "retention_s", "between 0 and 3600, got nan"),
    ],
)
def test_a_value_that_does_not_fit_the_message_is_named(
    query: Query, field: str, says: str
) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        wire.request_of(query)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert re.search(says.replace("^", r"\^"), violation.description)


async def test_deadline_is_typed_and_frees_the_server(echo: tuple[EchoGeneration, str]) -> None:
    async with AsyncBatonClient(echo[1]) as client:
        with pytest.raises(errors.DeadlineError):
            await client.complete(Query("hang"), timeout_s=0.3)
        await happened(echo[0].ended)


@pytest.mark.parametrize("timeout_s", [1e300, float("inf")])
async def test_a_time_limit_beyond_all_clocks_is_none(
    echo: tuple[EchoGeneration, str], timeout_s: float
) -> None:
    async with AsyncBatonClient(echo[1]) as client:
        assert (await client.complete(Query("one"), timeout_s=timeout_s)).text == "one "
        with pytest.raises(errors.InvalidRequestError, match="timeout_s"):
            await client.complete(Query("one"), timeout_s=float("nan"))


async def test_cancelling_the_task_aborts_the_request(echo: tuple[EchoGeneration, str]) -> None:
    async with AsyncBatonClient(echo[1]) as client:
        task = asyncio.create_task(client.complete(Query("hang", request_id="r1")))
        await happened(echo[0].started)
        assert await client.abort(["r1", "unknown"]) == ("r1",)
        task.cancel()
        await happened(echo[0].ended)


async def test_leaving_the_sync_iterator_aborts_the_request(
    echo: tuple[EchoGeneration, str],
) -> None:
    may_close = threading.Event()

    def leave_early() -> None:
        with BatonClient(echo[1]) as client:
            events = client.generate(Query("hang"))
            assert isinstance(next(events), Chunk)
            events.close()
            assert threading.current_thread() is not threading.main_thread()
            assert may_close.wait(30), "it is the call that has to end, not the channel"

    leaving = asyncio.create_task(asyncio.to_thread(leave_early))
    await happened(echo[0].ended)
    may_close.set()
    await leaving


async def test_an_unreachable_server_is_unavailable() -> None:
    async with AsyncBatonClient("127.0.0.1:1") as client:
        with pytest.raises(errors.UnavailableError, match=r"127\.0\.0\.1:1"):
            await client.complete(Query("x"), timeout_s=30)


async def test_a_call_aborted_by_grpc_is_not_reported_as_unreachable() -> None:
    """As it does where more calls come than an event loop takes from it; the router is there."""

    class GivesUp(EchoGeneration):
        async def Generate(
            self, request: pb.GenerateRequest, context: Context
        ) -> AsyncIterator[pb.GenerateResponse]:
            await context.abort(grpc.StatusCode.CANCELLED)
            yield pb.GenerateResponse()

    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(GivesUp(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncBatonClient(f"127.0.0.1:{port}", retry=NO_RETRY) as client:
        with pytest.raises(errors.UnavailableError, match="cancelled the call before it responded"):
            await client.complete(Query("x"))
    await server.stop(0)


async def test_bad_target_is_named() -> None:
    with pytest.raises(errors.ConfigError, match="nowhere"):
        AsyncBatonClient("nowhere")
