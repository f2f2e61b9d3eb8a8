"""OpenAI's HTTP API in front of a cluster, with the official client: the gateway returns Baton's
responses.

One cluster with the shipped model. The expected values are Baton's own responses to the same
requests.
"""

import asyncio
import contextlib
import json
import shlex
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import grpc
import httpx2
import jsonschema
import openai
import pytest
import pytest_asyncio
import yaml
from google.protobuf.message import Message
from openai.types.chat import (
    ChatCompletionMessageParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolUnionParam,
)
from pydantic import BaseModel
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc
from tokenizers import Tokenizer, processors

from baton.first_question import FirstQuestion
from baton.gateway import wait_ready
from baton.values import ChatMessage, Completion, Query, Sampling, Stop, ToolCall
from runtime.rpc.client import open_channel
from tests.support.cluster.clusters import RunningCluster, running_cluster
from tests.support.router.gateway import gateway

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
pytestmark = pytest.mark.asyncio(loop_scope="module")
QUESTION = "Count from 3 by 2."
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
CHAT = (ChatMessage("user", QUESTION),)
PROMPT = "Near the library Ivan hid a red"
DENSE: Any = {
    "temperature": 0,
    "frequency_penalty": 2,
}  # else so small a model fills all whitespace a schema allows
ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NAMED: ChatCompletionNamedToolChoiceParam = {"type": "function", "function": {"name": "add"}}
TOOLS: list[ChatCompletionToolUnionParam] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": ARGUMENTS},
    }
]


def with_bos(folder: Path) -> Path:
    """Write the shipped model with a tokenizer that begins each text with a special token, as
    Llama's and Gemma's do."""
    shutil.copytree(MODEL, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningCluster]:
    async with running_cluster(
        with_bos(tmp_path_factory.mktemp("bos") / "model"),
        http="127.0.0.1:0",
        model_alias=("another-name",),
    ) as cluster:
        yield cluster
        await cluster.until_clean()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: RunningCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(running.cluster.http_address) as client:
        yield client


def client_of(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=120
    )


async def answer(running: RunningCluster, query: Query) -> Completion:
    return await running.client.complete(query, timeout_s=120)


async def greedy_chat(running: RunningCluster) -> Completion:
    return await answer(running, Query(CHAT, Sampling(temperature=0)))


async def test_the_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["model"]
    assert (await client.models.retrieve("model")).id == "model"


async def test_an_alias_selects_the_model(
    running: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    """Over HTTP and gRPC; other names select none."""
    expected = await greedy_chat(running)
    got = await client.chat.completions.create(
        model="another-name", messages=MESSAGES, temperature=0
    )
    assert got.choices[0].message.content == expected.text
    named = Query(CHAT, Sampling(temperature=0), model="another-name")
    assert (await answer(running, named)).text == expected.text
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=MESSAGES)


async def test_a_chat_response_equals_that_of_grpc(
    running: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    expected = await greedy_chat(running)
    got = await client.chat.completions.create(model="model", messages=MESSAGES, temperature=0)
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].finish_reason == "stop"
    assert got.usage is not None
    usage = expected.finish.usage
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (
        usage.prompt_tokens,
        usage.completion_tokens,
    )


async def test_a_stream_is_the_whole_response_token_by_token(
    running: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    expected = await greedy_chat(running)
    pieces, reasons, usages = [], [], []
    async for chunk in await client.chat.completions.create(
        model="model",
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        usages += [chunk.usage] if chunk.usage is not None else []
    assert "".join(pieces) == expected.text
    assert len(pieces) > 1  # as many as tokens, unless the pool is faster than the client
    assert reasons == ["stop"]
    assert [usage.completion_tokens for usage in usages] == [
        expected.finish.usage.completion_tokens
    ]


async def test_a_completion_whole_and_streamed(
    running: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    expected = await answer(running, Query(PROMPT, Sampling(temperature=0), Stop(max_tokens=12)))
    assert expected.text
    whole = await client.completions.create(
        model="model", prompt=PROMPT, temperature=0, max_tokens=12
    )
    assert whole.choices[0].text == expected.text
    assert whole.usage is not None
    bare = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(PROMPT).ids
    assert whole.usage.prompt_tokens == expected.finish.usage.prompt_tokens == len(bare) + 1
    stream = await client.completions.create(
        model="model", prompt=PROMPT, temperature=0, max_tokens=12, stream=True
    )
    assert (
        "".join([choice.text async for chunk in stream for choice in chunk.choices])
        == expected.text
    )


PARTS: Any = [{"type": "text", "text": "Count from 3"}, {"type": "text", "text": " by 2."}]
TALK: dict[str, tuple[tuple[ChatMessage, ...], list[Any]]] = {
    "a question": (CHAT, MESSAGES),
    "several turns": (
        (*CHAT, ChatMessage("assistant", "3 5 7"), *CHAT),
        [*MESSAGES, {"role": "assistant", "content": "3 5 7"}, *MESSAGES],
    ),
    "parts": (
        (ChatMessage("user", ("Count from 3", " by 2.")),),
        [{"role": "user", "content": PARTS}],
    ),
    "a call without text": (
        (
            *CHAT,
            ChatMessage("assistant", None, "", (ToolCall("add", "{}", "c"),)),
            ChatMessage("tool", "4", tool_call_id="c"),
        ),
        [
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "4", "tool_call_id": "c"},
        ],
    ),
    "characters of many bytes": (
        (ChatMessage("user", "größe 東京 👋🏽 <|end|>"),),
        [{"role": "user", "content": "größe 東京 👋🏽 <|end|>"}],
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", TALK)
async def test_a_chat_has_the_same_tokens_as_grpc(
    running: RunningCluster,
    client: openai.AsyncOpenAI,
    name: str,
    stream: bool,  # noqa: FBT001
) -> None:
    """Prompt lengths are equal, and each token of a free output has the same logprob, also inside a
    character."""
    ours, theirs = TALK[name]
    sampling = Sampling(temperature=1.5, seed=11)
    expected = await answer(
        running, Query(ours, sampling, Stop(max_tokens=24, ignore_eos=True), num_top_logprobs=0)
    )
    request: dict[str, Any] = {
        "model": "model",
        "messages": theirs,
        "temperature": 1.5,
        "seed": 11,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }
    if stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    got: Any = await client.chat.completions.create(**request)
    chunks = [chunk async for chunk in got] if stream else [got]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == expected.finish.usage.prompt_tokens
    choices: list[Any] = [choice for chunk in chunks for choice in chunk.choices]
    pieces = [(choice.delta if stream else choice.message).content or "" for choice in choices]
    found = [
        item.logprob
        for choice in choices
        if choice.logprobs
        for item in choice.logprobs.content or ()
    ]
    assert expected.text.startswith("".join(pieces))
    assert len(expected.text) - len("".join(pieces)) <= 1, "but for a character that the end cut"
    assert len(found) >= 24 - (4 if stream else 0), (
        "but for tokens of which a stream never had the text"
    )
    assert found == pytest.approx(
        [item.logprob for item in expected.logprobs[: len(found)]], abs=1e-6
    )


async def test_responses_are_whole_streamed_and_continued(
    running: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    expected = await greedy_chat(running)
    first = await client.responses.create(model="model", input=QUESTION, temperature=0)
    assert first.output_text == expected.text
    events = [
        event
        async for event in await client.responses.create(
            model="model", input=QUESTION, temperature=0, stream=True
        )
    ]
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == expected.text
    )
    assert events[-1].type == "response.completed"
    talk = (
        *CHAT,
        ChatMessage("assistant", expected.text),
        ChatMessage("user", "Count from 2 by 2."),
    )
    further = await answer(running, Query(talk, Sampling(temperature=0)))
    second = await client.responses.create(
        model="model", input="Count from 2 by 2.", temperature=0, previous_response_id=first.id
    )
    assert second.output_text == further.text
    assert second.usage is not None
    assert second.usage.input_tokens == further.finish.usage.prompt_tokens


async def test_a_tool_is_called_with_arguments_of_its_schema(client: openai.AsyncOpenAI) -> None:
    got = await client.chat.completions.create(
        model="model", messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, **DENSE
    )
    (call,) = got.choices[0].message.tool_calls or [None]
    assert call is not None, got
    assert call.type == "function"
    assert call.function.name == "add"
    jsonschema.validate(json.loads(call.function.arguments), ARGUMENTS)
    stream = await client.chat.completions.create(
        model="model", messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, stream=True, **DENSE
    )
    parts = [
        part.function
        async for chunk in stream
        for each in chunk.choices
        for part in each.delta.tool_calls or ()
        if part.function is not None
    ]
    assert "".join(part.name or "" for part in parts) == "add"
    assert json.loads("".join(part.arguments or "" for part in parts)) == json.loads(
        call.function.arguments
    )


async def test_tools_that_are_not_called_change_nothing(
    running: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    got = await client.chat.completions.create(
        model="model", messages=MESSAGES, temperature=0, tools=TOOLS
    )
    assert got.choices[0].message.tool_calls is None
    assert got.choices[0].message.content == (await greedy_chat(running)).text


class Color(BaseModel):
    """Schema of a requested response."""

    color: Literal["red", "blue"]
    is_dark: bool


async def test_output_follows_a_schema(client: openai.AsyncOpenAI) -> None:
    parsed = await client.chat.completions.parse(
        model="model", messages=MESSAGES, response_format=Color, **DENSE
    )
    assert isinstance(parsed.choices[0].message.parsed, Color)
    got = await client.chat.completions.create(
        model="model",
        messages=MESSAGES,
        **DENSE,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": ARGUMENTS},
        },
    )
    jsonschema.validate(json.loads(got.choices[0].message.content or ""), ARGUMENTS)


async def test_logprobs_are_batons(running: RunningCluster, client: openai.AsyncOpenAI) -> None:
    expected = await answer(running, Query(CHAT, Sampling(temperature=0), num_top_logprobs=2))
    got = await client.chat.completions.create(
        model="model", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2
    )
    assert got.choices[0].logprobs is not None
    content = got.choices[0].logprobs.content or []
    ours = expected.logprobs[: len(content)]  # the end-of-sequence token has no text
    assert len(content) >= len(expected.logprobs) - 1
    assert [item.logprob for item in content] == pytest.approx(
        [item.logprob for item in ours], abs=1e-6
    )
    assert [[top.logprob for top in item.top_logprobs] for item in content] == [
        pytest.approx([logprob for _, logprob in item.top], abs=1e-6) for item in ours
    ]


async def test_several_choices_differ_by_seed_and_repeat(
    running: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    query = Query(CHAT, Sampling(temperature=1.5, seed=5), Stop(max_tokens=8), n=3)
    expected = await running.client.choices(query, timeout_s=120)
    got = await client.chat.completions.create(
        model="model", messages=MESSAGES, temperature=1.5, seed=5, n=3, max_tokens=8
    )
    # smg numbers them as they finish.
    assert sorted(choice.message.content or "" for choice in got.choices) == sorted(
        each.text for each in expected
    )
    assert len({each.text for each in expected}) > 1


BAD: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "another model": ({"model": "other"}, openai.NotFoundError, "other"),
    "a temperature out of range": ({"temperature": -1}, openai.BadRequestError, "temperature"),
    "no messages": ({"messages": []}, openai.BadRequestError, "messages"),
    "a prompt too long": (
        {"messages": [{"role": "user", "content": "Count from 3 by 2. " * 2000}]},
        openai.BadRequestError,
        "2048",
    ),
    "a schema that is none": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
            }
        },
        openai.BadRequestError,
        "nonsense",
    ),
    "an image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
                    ],
                }
            ]
        },
        openai.BadRequestError,
        "image",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_unsupported_parameters_are_refused_by_name(
    client: openai.AsyncOpenAI, name: str
) -> None:
    change, kind, words = BAD[name]
    request: dict[str, Any] = {"model": "model", "messages": MESSAGES, **change}
    with pytest.raises(kind, match=words):
        await client.chat.completions.create(**request)


async def test_a_prompt_of_ids_is_refused_by_name(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt"):
        await client.completions.create(model="model", prompt=[1, 2, 3])


async def test_a_body_above_the_limit_is_refused_by_its_length(running: RunningCluster) -> None:
    """The refusal comes before the body: a later one may be lost with the connection."""
    host, port = running.cluster.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % (17 << 20)
    )
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"max_payload_size" in answer


async def test_a_client_that_leaves_gives_its_pages_back(
    running: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    endless = {"ignore_eos": True}
    stream = await client.chat.completions.create(
        model="model", messages=MESSAGES, max_tokens=1900, stream=True, extra_body=endless
    )
    await anext(aiter(stream))
    await running.until(
        lambda status: any(worker.running_requests for worker in status.workers), "it runs"
    )
    await stream.close()
    await running.until_clean()
    # A request that is not streamed is cancelled, too.
    waiting = asyncio.create_task(
        client.chat.completions.create(
            model="model", messages=MESSAGES, max_tokens=1900, extra_body=endless
        )
    )
    await running.until(
        lambda status: any(worker.running_requests for worker in status.workers), "it runs"
    )
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await running.until_clean()


async def test_the_line_that_is_printed_to_be_tried_works(running: RunningCluster) -> None:
    program, url, *flags = shlex.split(
        FirstQuestion.of(None).curl(running.cluster.http_address, "model")
    )
    assert (program, [flag for flag in flags if flag.startswith("-")]) == ("curl", ["-H", "-d"])
    name, _, value = flags[1].partition(": ")
    async with httpx2.AsyncClient(timeout=120) as http:
        said = await http.post(url, headers={name: value}, content=flags[3])
    assert said.json()["choices"][0]["message"]["content"] == (await greedy_chat(running)).text


async def test_prometheus_targets_list_every_process(running: RunningCluster) -> None:
    jobs = yaml.safe_load(running.cluster.write_scrape_config().read_text())["scrape_configs"]
    found = {
        entry["labels"]["process"]: entry["targets"][0]
        for job in jobs
        for entry in job["static_configs"]
    }
    assert found.keys() == running.cluster.processes.keys()
    async with httpx2.AsyncClient(timeout=120) as http:
        said = {
            name: (await http.get(f"http://{target}/metrics")).text
            for name, target in found.items()
        }
    assert {name for name, text in said.items() if "baton_build_info" in text} == found.keys() - {
        "gateway"
    }
    assert "smg_" in said["gateway"]


async def test_routers_cannot_be_added_over_http(running: RunningCluster) -> None:
    """Requests have no body: the gateway refuses before it reads one, and closes a connection whose
    body comes later."""
    async with httpx2.AsyncClient(
        base_url=f"http://{running.cluster.http_address}", timeout=120
    ) as http:
        assert (await http.post("/workers")).status_code == 401
        assert (await http.get("/workers")).status_code == 401


async def test_a_killed_gateway_restarts_at_its_address(
    running: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    process, address = running.cluster.processes["gateway"], running.cluster.http_address
    process.kill()
    async with asyncio.timeout(60):
        while process.num_starts < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await wait_ready(address, timeout_s=60)
    got = await client.chat.completions.create(model="model", messages=MESSAGES, temperature=0)
    assert got.choices[0].message.content == (await greedy_chat(running)).text


Context = grpc.aio.ServicerContext[Any, Any]


async def test_a_router_that_dies_is_used_again_when_it_is_back(running: RunningCluster) -> None:
    """No circuit stays open for minutes: there is no other router to go to."""
    expected = (await greedy_chat(running)).text
    running.cluster.processes["router"].kill()
    async with client_of(running.cluster.http_address) as client, asyncio.timeout(120):
        while True:
            with contextlib.suppress(openai.InternalServerError):
                got = await client.chat.completions.create(
                    model="model", messages=MESSAGES, temperature=0
                )
                break
            await asyncio.sleep(0.1)
    assert got.choices[0].message.content == expected
    await running.cluster.wait_serving(timeout_s=60)


class Elsewhere(vllm_grpc.VllmEngineServicer):  # type: ignore[misc]  # published without types
    """A router as seen by a gateway on another host, which lacks its folder."""

    def __init__(self, router: vllm_grpc.VllmEngineStub) -> None:
        self._router = router
        self.sent_tokenizer = False

    async def GetModelInfo(self, request: Message, context: Context) -> vllm.GetModelInfoResponse:
        info: vllm.GetModelInfoResponse = await self._router.GetModelInfo(request)
        assert Path(info.tokenizer_path).is_absolute(), "a relative name is one of a hub"
        info.tokenizer_path = info.model_path = "/not/on/this/host"
        return info

    async def GetTokenizer(self, request: Message, context: Context) -> AsyncIterator[Message]:
        self.sent_tokenizer = True
        async for chunk in self._router.GetTokenizer(request):
            yield chunk

    async def Generate(self, request: Message, context: Context) -> AsyncIterator[Message]:
        async for response in self._router.Generate(request):
            yield response

    async def HealthCheck(self, request: Message, context: Context) -> Message:
        answered: Message = await self._router.HealthCheck(request)
        return answered

    async def GetServerInfo(self, request: Message, context: Context) -> Message:
        answered: Message = await self._router.GetServerInfo(request)
        return answered

    async def GetLoads(self, request: Message, context: Context) -> Message:
        answered: Message = await self._router.GetLoads(request)
        return answered


async def test_a_gateway_on_another_host_gets_the_tokenizer_from_the_router(
    running: RunningCluster, tmp_path: Path
) -> None:
    async with open_channel(running.cluster.address) as channel:
        elsewhere, server = Elsewhere(vllm_grpc.VllmEngineStub(channel)), grpc.aio.server()
        vllm_grpc.add_VllmEngineServicer_to_server(elsewhere, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with (
                gateway(f"127.0.0.1:{port}", tmp_path) as address,
                client_of(address) as client,
            ):
                got = await client.chat.completions.create(
                    model="model", messages=MESSAGES, temperature=0
                )
        finally:
            await server.stop(None)
    assert got.choices[0].message.content == (await greedy_chat(running)).text
    assert elsewhere.sent_tokenizer


async def test_configured_api_keys_are_required(running: RunningCluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the tests\nalice 0123456789abcdef0123\nfedcba98765432100123\n")
    async with gateway(running.cluster.address, tmp_path, "--token-file", str(keys)) as address:
        client = client_of(address)
        for key in ("0123456789abcdef0123", "fedcba98765432100123"):
            mine = client.with_options(api_key=key)
            assert (
                await mine.completions.create(model="model", prompt=PROMPT, max_tokens=1)
            ).choices
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model="model", prompt=PROMPT, max_tokens=1)
        await client.close()
