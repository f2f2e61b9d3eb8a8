"""The services for gateways as an external client sees them: the engine contract by its published
stubs, and cache events over ZeroMQ.

One cluster with the shipped model.
"""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc
from tokenizers import Tokenizer

from tests.support.cluster.clusters import running_cluster
from tests.support.router.outside import Json, Outsider, ask, details_of

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for addresses of ZeroMQ."""
    return tmp_path_factory.mktemp("zmq")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outsider(sockets: Path) -> AsyncIterator[Outsider]:
    flags = (
        "--vllm-engine",
        "--kv-events",
        f"ipc://{sockets}/events",
        "--kv-events-replay",
        f"ipc://{sockets}/missed",
        "--kv-events-topic",
        "kv@here@model",
    )
    async with running_cluster(MODEL, decode_pp=2, router_flags=flags) as running:
        client = Outsider(running.cluster.address)
        yield client
        await client.close()
        await running.until_clean()


def vllm_request(prompt: list[int], params: Json, *, stream: bool = False) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(input_ids=prompt),
        stream=stream,
        sampling_params=vllm.SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **params}),
    )


async def ask_vllm(
    outsider: Outsider, request: vllm.GenerateRequest
) -> list[vllm.GenerateResponse]:
    stub = vllm_grpc.VllmEngineStub(outsider.channel)
    return [response async for response in stub.Generate(request, timeout=60)]


async def test_vllm_gateways_get_the_same_response(outsider: Outsider) -> None:
    """Streamed and whole, with logprobs of prompt and output, against the native service."""
    prompt = [5, 6, 7, 8]
    native = await ask(
        outsider,
        {
            "tokenIds": {"ids": prompt},
            "numTopLogprobs": 2,
            "numPromptLogprobs": 1,
            "stop": {"maxTokens": 6, "ignoreEos": True},
        },
    )
    wanted = {"max_tokens": 6, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}
    *chunks, last = await ask_vllm(outsider, vllm_request(prompt, wanted, stream=True))
    (whole,) = await ask_vllm(outsider, vllm_request(prompt, wanted))
    complete = whole.complete
    assert list(complete.output_ids) == list(last.complete.output_ids) == native.token_ids
    assert [token for part in chunks for token in part.chunk.token_ids] == native.token_ids
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == (
        "length",
        4,
        6,
    )
    logprobs = [item for chunk in native.chunks for item in chunk.get("logprobs", [])]
    assert list(complete.output_logprobs.token_logprobs) == pytest.approx(
        [item["logprob"] for item in logprobs]
    )
    assert [list(top.token_ids) for top in complete.output_logprobs.top_logprobs] == [
        [top["tokenId"] for top in item["top"]] for item in logprobs
    ]
    streamed = [value for part in chunks for value in part.chunk.output_logprobs.token_logprobs]
    assert streamed == list(complete.output_logprobs.token_logprobs)
    for scored in (complete.input_logprobs, chunks[0].chunk.input_logprobs):
        assert list(scored.token_ids) == prompt
        assert [item.HasField("value") for item in scored.token_logprobs] == [
            False,
            True,
            True,
            True,
        ]
        assert [len(top.values) for top in scored.top_logprobs] == [0, 1, 1, 1]


VLLM_ANSWERS: dict[str, tuple[Json, Any]] = {
    "n": ({"n": 3}, lambda found: [answer.index for answer in found] == [0, 1, 2]),
    "top_k": ({"temperature": 1.0, "top_k": 1, "seed": -1}, lambda found: found[0].finish_reason),
    "stop string": (
        {"stop": ["b"], "regex": "aabaa", "max_tokens": 9},
        lambda found: (found[0].finish_reason, found[0].matched_stop_str) == ("stop", "b"),
    ),
    "stop token": (
        {"stop_token_ids": [9], "logit_bias": {9: 100.0}},
        lambda found: (list(found[0].output_ids), found[0].matched_token_id) == ([9], 9),
    ),
    "min_tokens": ({"min_tokens": 4}, lambda found: len(found[0].output_ids) == 4),
    "penalties": (
        {
            "frequency_penalty": 1.0,
            "presence_penalty": 1.0,
            "repetition_penalty": 1.2,
            "min_p": 0.1,
            "top_p": 0.9,
        },
        lambda found: found[0].finish_reason,
    ),
    "json_schema": (
        {"json_schema": '{"const": 7}', "max_tokens": 9},
        lambda found: found[0].finish_reason == "stop",
    ),
    "choice": (
        {"choice": vllm.ChoiceConstraint(choices=["a+b", "a.b/c"]), "max_tokens": 9},
        lambda found: found[0].finish_reason == "stop",
    ),
    "json_object": ({"json_object": True, "max_tokens": 2}, lambda found: found[0].output_ids),
    "shape of text": (
        {
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "include_stop_str_in_output": True,
            "grammar_from_first_token": True,
        },
        lambda found: found[0].finish_reason,
    ),
}


@pytest.mark.parametrize("name", VLLM_ANSWERS)
async def test_vllm_fields_have_their_effect(outsider: Outsider, name: str) -> None:
    params, holds = VLLM_ANSWERS[name]
    found = [
        response.complete for response in await ask_vllm(outsider, vllm_request([5, 6, 7], params))
    ]
    assert holds(sorted(found, key=lambda answer: answer.index)), found


BAD = grpc.StatusCode.INVALID_ARGUMENT
VLLM_REFUSED: dict[str, tuple[Json, Json, grpc.StatusCode, str]] = {
    "kv_transfer_params_json": ({"kv_transfer_params_json": "{}"}, {}, BAD, "not supported here"),
    "mm_inputs": ({"mm_inputs": vllm.MultimodalInputs()}, {}, BAD, "not supported here"),
    "extra_mm_inputs": (
        {"extra_mm_inputs": [vllm.MultimodalInputs()]},
        {},
        BAD,
        "not supported here",
    ),
    "media_refs": ({"media_refs": vllm.MediaRefs()}, {}, BAD, "not supported here"),
    "data_parallel_rank": ({"data_parallel_rank": 1}, {}, BAD, "not supported here"),
    "sampling_params.grammar": ({}, {"grammar": "root ::= x"}, BAD, "not supported here"),
    "sampling_params.structural_tag": ({}, {"structural_tag": "{}"}, BAD, "not supported here"),
    "sampling_params.truncate_prompt_tokens": (
        {},
        {"truncate_prompt_tokens": 1},
        BAD,
        "not supported here",
    ),
    "sampling_params.top_p": ({}, {"top_p": 2.0}, BAD, "at most 1"),
    "sampling_params.n": ({}, {"n": 99}, BAD, "between 1 and 16"),
    "sampling_params.logprobs": ({}, {"logprobs": -1}, BAD, "whole vocabulary"),
    "sampling_params.regex": ({}, {"regex": "("}, BAD, "unclosed group"),
    "tokenized.input_ids": ({"tokenized": vllm.TokenizedInput()}, {}, BAD, "not be empty"),
}


@pytest.mark.parametrize("field", VLLM_REFUSED)
async def test_vllm_fields_that_baton_lacks_are_refused_by_name(
    outsider: Outsider, field: str
) -> None:
    fields, params, code, text = VLLM_REFUSED[field]
    request = vllm_request([5, 6], params)
    request.MergeFrom(vllm.GenerateRequest(**fields))
    if "tokenized" in fields:
        request.tokenized.CopyFrom(fields["tokenized"])
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await ask_vllm(outsider, request)
    assert failed.value.code() is code
    (violation,) = details_of(failed.value)["BadRequest"].field_violations
    assert violation.field == field
    assert text in violation.description


async def test_vllm_control_calls(outsider: Outsider) -> None:
    stub = vllm_grpc.VllmEngineStub(outsider.channel)
    assert (await stub.HealthCheck(vllm.HealthCheckRequest(), timeout=60)).healthy
    info = await stub.GetModelInfo(vllm.GetModelInfoRequest(), timeout=60)
    assert (info.served_model_name, info.is_generation, list(info.architectures)) == (
        "model",
        True,
        ["Qwen3_5ForCausalLM"],
    )
    assert (info.model_type, list(info.eos_token_ids)) == ("qwen3_5_text", [0, 3])
    reading = asyncio.create_task(
        ask_vllm(
            outsider,
            vllm.GenerateRequest(
                request_id="long",
                text="Mia",
                stream=True,
                sampling_params=vllm.SamplingParams(max_tokens=1800, ignore_eos=True),
            ),
        )
    )
    active = 0
    while not active:
        active = (await stub.GetServerInfo(vllm.GetServerInfoRequest(), timeout=60)).active_requests
    (load,) = (await stub.GetLoads(vllm.GetLoadsRequest(), timeout=60)).loads
    assert load.num_total_reqs <= 1, "as of the workers' last reports"
    assert load.max_total_num_tokens > 1000
    await stub.Abort(vllm.AbortRequest(request_ids=["long"]), timeout=60)
    assert (await reading)[-1].complete.finish_reason == "abort"
    parts = [part async for part in stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=60)]
    data = b"".join(part.data for part in parts)
    assert parts[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert set(archive.namelist()) == {
            "tokenizer.json",
            "tokenizer_config.json",
            "config.json",
            "chat_template.jinja",
        }
        ours, theirs = (
            Tokenizer.from_str(text.decode())
            for text in (archive.read("tokenizer.json"), (MODEL / "tokenizer.json").read_bytes())
        )
    assert ours.get_vocab() == theirs.get_vocab()
    assert info.tokenizer_path != str(MODEL), "gateways take what is there on their own host"
    for refused, call in (
        (grpc.StatusCode.INVALID_ARGUMENT, stub.Embed(vllm.EmbedRequest(), timeout=60)),
        (
            grpc.StatusCode.UNIMPLEMENTED,
            stub.StartProfile(common_pb2.StartProfileRequest(), timeout=60),
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
        assert failed.value.code() is refused


async def test_routers_in_front_follow_cache_events_over_zeromq(
    outsider: Outsider, sockets: Path
) -> None:
    """A late subscriber asks for what it has missed: the blocks of a prompt, with their tokens."""
    prompt = list(range(7, 137))
    await ask(outsider, {"tokenIds": {"ids": prompt}})
    told = set[tuple[int, ...]]()
    context = zmq.asyncio.Context()
    try:
        events = context.socket(zmq.SocketType.SUB)
        events.connect(f"ipc://{sockets}/events")
        events.subscribe("kv@here@model")
        missed = context.socket(zmq.SocketType.DEALER)
        missed.connect(f"ipc://{sockets}/missed")
        async with asyncio.timeout(60):
            while not {tuple(prompt[:64]), tuple(prompt[64:128])} <= told:
                await missed.send_multipart([b"", bytes(8)])
                _, number, _ = await missed.recv_multipart()
                assert number == b"\xff" * 8, "the first number is gone: a snapshot comes to all"
                while await events.poll(2000):
                    _, _, content = await events.recv_multipart()
                    for event in msgspec.msgpack.decode(content)[1]:
                        told.add(tuple(event.get("token_ids", ())))
    finally:
        context.destroy(linger=0)


async def test_vllm_gateways_follow_cache_events(outsider: Outsider) -> None:
    stub, prompt = vllm_grpc.VllmEngineStub(outsider.channel), list(range(5, 135))
    told: dict[int, list[int]] = {}
    async with asyncio.timeout(120):
        batches = aiter(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
        assert (await anext(batches)).snapshot.count == 1
        await ask(outsider, {"tokenIds": {"ids": prompt}})
        while not {tuple(prompt[:64]), tuple(prompt[64:128])} <= {
            tuple(ids) for ids in told.values()
        }:
            for event in (await anext(batches)).events:
                told |= {block.block_hash: list(block.token_ids) for block in event.stored.blocks}
        flushed = await stub.FlushCache(common_pb2.FlushCacheRequest())
        assert flushed.success, flushed.message
        while told:
            for event in (await anext(batches)).events:
                for key in event.removed.block_hashes:
                    told.pop(key, None)
        first, second = await anext(batches), await anext(batches)
    assert first.load.load_only
    assert second.load.load_only
    assert first.sequence_number == second.sequence_number
    assert second.load.sample == first.load.sample + 1
    loads = await stub.GetLoads(vllm.GetLoadsRequest(), timeout=60)
    assert second.load.max_running_requests == loads.loads[0].max_running_requests > 0
    assert second.load.running_requests == second.load.waiting_requests == 0
