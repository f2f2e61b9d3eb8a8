"""The vLLM contract without a router: refusals before any work, and files that are built once."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from tokenizers import Tokenizer, decoders

from protos import generation_pb2 as pb
from protos import types_pb2
from router.api.kv_events import CacheEvents
from router.api.vllm_engine import VllmEngineService
from router.api.vllm_tokenizer import NOWHERE, GatewayTokenizer, gateway_tokenizer
from router.api.vllm_translate import VllmAnswer, error_for_vllm, request_from_vllm
from router.config import RouterConfig
from router.text.carrier import CHAT_KEY
from router.text.model_facts import load_served_model
from runtime.errors import ConfigError, FieldViolation, InvalidRequestError
from tests.router.harness import EOS, FACTS, running_router, served_model, write_model_dir


def test_many_biases_are_refused_before_each_is_looked_at() -> None:
    request = vllm.GenerateRequest()
    request.sampling_params.logit_bias.update(dict.fromkeys(range(-1, 1024), 1.0))
    with pytest.raises(InvalidRequestError, match="1025 entries, the limit is 1024") as caught:
        request_from_vllm(request)
    assert caught.value.violations[0].field == "sampling_params.logit_bias"


async def test_the_tokenizer_is_packed_once_and_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, pack = [], GatewayTokenizer.zipped

    def watched(files: GatewayTokenizer) -> tuple[bytes, str]:
        threads.append(threading.current_thread())
        return pack(files)

    monkeypatch.setattr(GatewayTokenizer, "zipped", watched)
    nobody: Any = None
    folder = write_model_dir(tmp_path)
    tokenizer = gateway_tokenizer(folder, load_served_model(folder), tmp_path / "cache")
    service = VllmEngineService(nobody, folder, tokenizer, CacheEvents(lambda name: False))

    async def read() -> bytes:
        return b"".join(
            [
                part.data
                async for part in service.GetTokenizer(common_pb2.GetTokenizerRequest(), nobody)
            ]
        )

    first, second = await asyncio.gather(read(), read())
    assert first == second == await read() != b""
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize(
    "given", [{}, {"top_p": 0.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 0.0}]
)
def test_absent_fields_are_not_the_models_defaults(given: dict[str, float]) -> None:
    """A gateway has put those in itself, and its zero is also what a client's "all tokens" looks
    like."""
    wanted = request_from_vllm(
        vllm.GenerateRequest(sampling_params=vllm.SamplingParams(**given))
    ).sampling
    assert (
        wanted.temperature,
        wanted.top_p,
        wanted.top_k,
        wanted.min_p,
        wanted.repetition_penalty,
    ) == (1, 1, 0, 0, 1)
    assert all(
        wanted.HasField(name)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    )


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
            '{"temperature": 0.6, "top_k": 20, "top_p": 0.95}',
        ),
        ({}, ""),
    ],
)
async def test_gateways_see_the_models_sampling_and_end_tokens(
    sampling: dict[str, float], expected: str, tmp_path: Path
) -> None:
    model = replace(served_model(), facts=replace(FACTS, sampling=sampling))
    nothing: Any = None
    async with running_router(model=model) as router:
        service = VllmEngineService(
            router.service, write_model_dir(tmp_path), None, CacheEvents(lambda name: False)
        )
        told = await service.GetModelInfo(vllm.GetModelInfoRequest(), nothing)
    assert told.default_sampling_params_json == expected
    assert list(told.eos_token_ids) == [EOS]


class AskedService:
    """A generation service that keeps what it was asked for, with these adapters."""

    def __init__(self) -> None:
        self.adapters: list[str] = []
        self.models: list[str] = []

    async def Generate(
        self, request: pb.GenerateRequest, context: object
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.models.append(request.model)
        yield pb.GenerateResponse(finish=pb.GenerateFinish(reason=types_pb2.FINISH_REASON_LENGTH))

    async def GetModelInfo(self, request: object, context: object) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(model="tiny", adapters=self.adapters)

    def problem(self) -> str:
        return ""

    default_sampling: Mapping[str, float] = {}


async def test_an_adapter_has_a_service_of_its_own(tmp_path: Path) -> None:
    """It names the adapter and asks for it, and is unhealthy while no worker has it."""
    generation, nothing = AskedService(), cast("Any", None)
    folder = write_model_dir(tmp_path)
    base = VllmEngineService(cast("Any", generation), folder, None, CacheEvents(lambda name: False))
    service = base.with_adapter("a")
    for each, model, name in ((base, "", "tiny"), (service, ":a", "tiny:a")):
        told = await each.GetModelInfo(vllm.GetModelInfoRequest(), nothing)
        assert told.served_model_name == name
        given = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1, 2, 3]))
        assert [part async for part in each.Generate(given, nothing)]
        assert generation.models[-1] == model
    health = [
        await each.HealthCheck(vllm.HealthCheckRequest(), nothing) for each in (base, service)
    ]
    assert [(each.healthy, each.message) for each in health] == [
        (True, "serving"),
        (False, "no worker has the adapter a"),
    ]
    generation.adapters.append("a")
    assert (await service.HealthCheck(vllm.HealthCheckRequest(), nothing)).healthy


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("a",), "must be NAME=HOST:PORT, once per adapter, got 'a'"),
        (("=127.0.0.1:1",), "must be NAME=HOST:PORT"),
        (("a=127.0.0.1:1", "a=127.0.0.1:2"), "got 'a=127.0.0.1:2'"),
        (("a=1",), "adapter_listen must be HOST:PORT, got '1'"),
        (("a=127.0.0.1:0",), "needs vllm_engine"),
    ],
)
def test_addresses_of_adapters_are_checked(
    given: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    config = RouterConfig(
        model=write_model_dir(tmp_path),
        prefill=("127.0.0.1:1",),
        decode=("127.0.0.1:2",),
        adapter_listen=given,
        vllm_engine=says != "needs vllm_engine",
    )
    with pytest.raises(ConfigError, match=says) as caught:
        config.check()
    assert caught.value.field == "adapter_listen"


def test_a_tokenizer_that_cannot_carry_texts_is_served_as_its_files(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path)
    lossy = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lossy.decoder = decoders.WordPiece()
    lossy.save(str(folder / "tokenizer.json"))
    tokenizer = gateway_tokenizer(folder, load_served_model(folder), tmp_path / "cache")
    assert tokenizer is not None
    assert (tokenizer.carrier, tokenizer.folder) == (None, str(folder))
    assert tokenizer.files == {
        name: (folder / name).read_bytes()
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json")
    }
    (folder / "tokenizer.json").unlink()
    assert gateway_tokenizer(folder, load_served_model(folder), tmp_path / "cache") is None


def test_a_gateway_on_the_same_host_finds_the_files_others_receive(tmp_path: Path) -> None:
    folder, cache = write_model_dir(tmp_path / "model"), tmp_path / "cache"
    model = load_served_model(folder)
    for _ in range(2):  # the second time they are there
        tokenizer = gateway_tokenizer(folder, model, cache)
        assert tokenizer is not None
        assert {
            file.name: file.read_bytes() for file in Path(tokenizer.folder).iterdir()
        } == tokenizer.files
        assert [str(path) for path in cache.iterdir()] == [tokenizer.folder]
    unwritable = tmp_path / "file"
    unwritable.write_text("")
    tokenizer = gateway_tokenizer(folder, model, unwritable / "cache")
    assert tokenizer is not None
    assert tokenizer.folder == NOWHERE


SPELLED = {
    1: b"a",
    2: " \U0001f99c".encode()[:2],
    3: " \U0001f99c".encode()[2:],
    4: b"",
    5: b"\xff",
    6: b"b",
}


@pytest.mark.parametrize(
    ("token_ids", "chunks"),
    [
        ([1, 2, 3, 6], [[1], [2, 3], [6]]),  # inside a character, though a space before it is whole
        ([1, 4, 6], [[1], [4, 6]]),  # without text of its own
        ([1, 5, 6], [[1], [5, 6]]),  # gateways wait after a possible start of a character
        ([1, 2], [[1], [2]]),  # the end of the stream
        ([4, 4], [[4, 4]]),
    ],
)
def test_tokens_of_scored_streams_wait_for_their_text(
    token_ids: list[int], chunks: list[list[int]]
) -> None:
    request = vllm.GenerateRequest(
        stream=True, sampling_params=vllm.SamplingParams(logprobs=0, n=2)
    )
    answer = VllmAnswer(request, SPELLED.__getitem__)
    sent: list[vllm.GenerateResponse] = []
    for token_id in token_ids:
        for index in (0, 1):
            chunk = pb.GenerateChunk(
                token_ids=[token_id], logprobs=[types_pb2.TokenLogprobs(logprob=-token_id)]
            )
            sent += answer.add(pb.GenerateResponse(chunk=chunk, index=index))
    for index in (0, 1):
        sent += answer.add(
            pb.GenerateResponse(
                finish=pb.GenerateFinish(reason=types_pb2.FINISH_REASON_STOP), index=index
            )
        )
    for index in (0, 1):
        mine = [each.chunk for each in sent if each.HasField("chunk") and each.chunk.index == index]
        assert [list(chunk.token_ids) for chunk in mine] == chunks
        assert [list(chunk.output_logprobs.token_logprobs) for chunk in mine] == [
            [-token_id for token_id in ids] for ids in chunks
        ]
        (complete,) = (
            each.complete
            for each in sent
            if each.HasField("complete") and each.complete.index == index
        )
        assert list(complete.output_ids) == token_ids


def test_tokens_of_other_streams_wait_for_nothing() -> None:
    answer = VllmAnswer(vllm.GenerateRequest(stream=True), SPELLED.__getitem__)
    (sent,) = answer.add(pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=[2])))
    assert list(sent.chunk.token_ids) == [2]


def carried(**chat: Any) -> str:  # noqa: ANN401
    return json.dumps(
        {CHAT_KEY: {"tools": [], "arguments": {"": 0}, "goes_on": False, "messages": [], **chat}}
    )


def test_a_carried_chat_is_a_chat_of_batons_api() -> None:
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": {"z": 1, "a": "ö"}},
    }
    text = carried(
        tools=[{"x": "ö"}],
        arguments={"": 0, "mood": [1]},
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "name": "Ada",
            },
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": "42", "tool_call_id": "c"},
            {"role": "user", "content": []},
        ],
    )
    request = request_from_vllm(
        vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1])), text
    )
    assert request.chat == pb.ChatMessages(
        messages=[
            pb.ChatMessage(
                role="user",
                content_parts=[pb.ContentPart(text="a"), pb.ContentPart(text="b")],
                name="Ada",
            ),
            pb.ChatMessage(
                role="assistant",
                reasoning_content="hm",
                tool_calls=[pb.ToolCall(id="c", name="f", arguments='{"z": 1, "a": "ö"}')],
            ),
            pb.ChatMessage(role="tool", content="42", tool_call_id="c"),
            pb.ChatMessage(role="user", content=""),
        ],
        tools=['{"x": "ö"}'],
        template_arguments='{"mood": [1]}',
    )


@pytest.mark.parametrize(
    "content",
    [
        "It isTAG",
        [{"type": "text", "text": "It isTAG"}],
        [{"type": "text", "text": "Yes."}, {"type": "text", "text": "It isTAG"}],
    ],
)
def test_the_tag_of_a_final_message_is_cut(content: Any) -> None:  # noqa: ANN401
    text = carried(goes_on=True, messages=[{"role": "assistant", "content": content}]) + "It is"
    chat = request_from_vllm(vllm.GenerateRequest(), text).chat
    assert chat.continue_final_message
    (message,) = chat.messages
    assert [message.content, *(part.text for part in message.content_parts)][-1] == "It is"


@pytest.mark.parametrize(
    "text",
    [
        "red",
        carried()[:-1],
        carried(messages=3),
        carried(messages=["a"]),
        carried(tools={}),
        json.dumps({CHAT_KEY: []}),
        f'{{"{CHAT_KEY}": ' + "[" * 100_000,
    ],
)
def test_any_other_text_is_a_text(text: str) -> None:
    assert request_from_vllm(vllm.GenerateRequest(), text).text == text


def test_non_text_content_in_a_chat_is_refused_by_name() -> None:
    text = carried(messages=[{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(
        InvalidRequestError, match="a part of the type 'image'; only texts"
    ) as caught:
        request_from_vllm(vllm.GenerateRequest(), text)
    assert caught.value.violations[0].field == "messages[0].content"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("chat.messages[2].role", "messages[2].role"),
        ("chat", "messages"),
        ("chat.tools[0]", "tools[0]"),
        ("chat.template_arguments", "chat_template_kwargs"),
        ("text", "prompt"),
        ("n", "sampling_params.n"),
    ],
)
def test_errors_have_the_names_that_clients_use(ours: str, theirs: str) -> None:
    (violation,) = error_for_vllm(InvalidRequestError(FieldViolation(ours, "is wrong"))).violations
    assert violation.field == theirs
