"""The public gRPC API as an external client sees it: reflection, published stubs and the protos'
documentation only.

One cluster with the shipped model; every field of a request does something, and every bad one has
its status.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from tests.support.cluster.clusters import running_cluster
from tests.support.router.outside import GENERATE, SHORT, Json, Outsider, ask, details_of, merged

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outsider() -> AsyncIterator[Outsider]:
    flags = (
        "--channelz",
        "--vllm-engine",
        "--max-message-bytes",
        str(1 << 20),
        "--max-connection-age-s",
        "300",
        "--priority-limits",
        "*=-100",
    )
    async with running_cluster(MODEL, decode_pp=2, router_flags=flags) as running:
        client = Outsider(running.cluster.address)
        yield client
        await client.close()
        await running.until_clean()


# Every field of a request -> a value, and a check of the response.
FIELDS: dict[str, tuple[Json, Any]] = {
    "request_id": (
        {"requestId": "mine"},
        lambda a: {r["requestId"] for r in a.responses} == {"mine"},
    ),
    "model": ({"model": "model"}, lambda a: a.finishes),
    "text": ({"text": "Hi"}, lambda a: a.finishes[0]["usage"]["promptTokens"] >= 1),
    "token_ids": (
        {"tokenIds": {"ids": [5, 6, 7]}},
        lambda a: a.finishes[0]["usage"]["promptTokens"] == 3,
    ),
    "chat": (
        {"chat": {"messages": [{"role": "user", "content": "Count from 3 by 2."}]}},
        lambda a: a.text,
    ),
    "skip_text": ({"skipText": True}, lambda a: a.token_ids and not a.text),
    "priority": ({"priority": -3}, lambda a: a.finishes),
    "speculate": ({"speculate": False}, lambda a: a.finishes),
    "prefix_cache": ({"prefixCache": False}, "greedy"),
    "cache_salt": ({"cacheSalt": "a tenant's"}, "greedy"),
    "session_id": ({"sessionId": "one of its own"}, "greedy"),
    "kv_hints": (
        {
            "kvHints": {
                "protocolVersion": "0.1",
                "actions": [
                    {"actionType": "kv.evict", "actionVersion": "0.1"},
                    {"actionType": "kv.unheard-of", "actionVersion": "0.1"},
                ],
            }
        },
        "greedy",
    ),
    "resumed": ({"resumed": [{"ids": []}]}, "greedy"),  # no token yet: the whole response
    "resumed_from": ({"resumed": [{"ids": []}], "resumedFrom": [""]}, "greedy"),
    "n": (
        {"n": 3},
        lambda a: sorted(r.get("index", 0) for r in a.responses if "finish" in r) == [0, 1, 2],
    ),
    "num_top_logprobs": (
        {"numTopLogprobs": 2},
        lambda a: len(a.chunks[0]["logprobs"][0]["top"]) == 2,
    ),
    "num_prompt_logprobs": (
        {"numPromptLogprobs": 1, "tokenIds": {"ids": [5, 6, 7]}},
        lambda a: a.chunks[0]["promptLogprobs"]["tokenIds"] == [6, 7],
    ),
    "structured_output": (
        {"structuredOutput": {"regex": "x{2}"}, "stop": {"maxTokens": 9}},
        lambda a: a.text == "xx",
    ),
    "structured_output.regex": (
        {"structuredOutput": {"regex": "yes|no"}, "stop": {"maxTokens": 9}},
        lambda a: a.text in ("yes", "no"),
    ),
    "structured_output.json_schema": (
        {
            "structuredOutput": {"jsonSchema": '{"enum": [[1, "a"], {"b": null}]}'},
            "stop": {"maxTokens": 300},
        },
        lambda a: json.loads(a.text) in ([1, "a"], {"b": None}),
    ),
    "sampling": ({"sampling": {}}, lambda a: a.finishes),
    "sampling.temperature": ({"sampling": {"temperature": 0.5}}, lambda a: a.finishes),
    "sampling.top_k": ({"sampling": {"temperature": 1, "topK": 1}}, "greedy"),
    "sampling.top_p": ({"sampling": {"temperature": 1, "topP": 1e-6}}, "greedy"),
    "sampling.min_p": ({"sampling": {"temperature": 1, "minP": 1, "seed": "7"}}, "repeatable"),
    "sampling.frequency_penalty": ({"sampling": {"frequencyPenalty": 2}}, lambda a: a.finishes),
    "sampling.presence_penalty": ({"sampling": {"presencePenalty": 2}}, lambda a: a.finishes),
    "sampling.repetition_penalty": ({"sampling": {"repetitionPenalty": 1.0}}, "greedy"),
    "sampling.seed": ({"sampling": {"temperature": 2, "seed": "7"}}, "repeatable"),
    "sampling.logit_bias": (
        {"sampling": {"logitBias": {"9": 100}}},
        lambda a: a.token_ids == [9] * 4,
    ),
    "stop": ({"stop": {"maxTokens": 2}}, lambda a: len(a.token_ids) <= 2),
    "stop.max_tokens": ({"stop": {"maxTokens": 1}}, lambda a: len(a.token_ids) == 1),
    "stop.min_tokens": ({"stop": {"minTokens": 4}}, lambda a: len(a.token_ids) == 4),
    "stop.stop_strings": (
        {"stop": {"stopStrings": ["b"], "maxTokens": 20}, "structuredOutput": {"regex": "aabaa"}},
        lambda a: (a.text, a.finishes[0]["stopString"]) == ("aa", "b"),
    ),
    "stop.stop_token_ids": (
        {"sampling": {"logitBias": {"9": 100}}, "stop": {"stopTokenIds": [9]}},
        lambda a: (a.token_ids, a.finishes[0]["stopTokenId"]) == ([9], 9),
    ),
    "stop.ignore_eos": (
        {"stop": {"ignoreEos": True}, "sampling": {"logitBias": {"0": 100}}},
        lambda a: a.token_ids == [0] * 4,
    ),
}


async def test_no_field_is_left_out(outsider: Outsider) -> None:
    """A field that is added to the protos must be exercised here."""
    expected = set()
    for field in outsider.message("baton.v1.GenerateRequest").fields:
        expected.add(field.name)
        if (
            field.name in ("sampling", "stop", "structured_output")
            and field.message_type is not None
        ):
            expected |= {f"{field.name}.{inner.name}" for inner in field.message_type.fields}
    assert set(FIELDS) == expected


@pytest.mark.parametrize("field", FIELDS)
async def test_every_field_behaves_as_the_proto_documents(outsider: Outsider, field: str) -> None:
    change, holds = FIELDS[field]
    answer = await ask(outsider, change)
    assert all(
        finish["reason"] in ("FINISH_REASON_STOP", "FINISH_REASON_LENGTH")
        for finish in answer.finishes
    )
    if holds in ("greedy", "repeatable"):
        again = await ask(outsider, {} if holds == "greedy" else change)
        assert answer.token_ids == again.token_ids
    else:
        assert holds(answer), answer.responses


REFUSED: dict[str, tuple[Json, str, str]] = {
    "no prompt": ({"text": ""}, "text", "must not be empty"),
    "no tokens": ({"tokenIds": {}}, "token_ids.ids", "must not be empty"),
    "foreign token": (
        {"tokenIds": {"ids": [1, 99999]}},
        "token_ids.ids[1]",
        "not in the vocabulary",
    ),
    "no messages": ({"chat": {}}, "chat.messages", "must not be empty"),
    "no role": (
        {"chat": {"messages": [{"content": "x"}]}},
        "chat.messages[0].role",
        "must not be empty",
    ),
    "long id": ({"requestId": "x" * 129}, "request_id", "the limit is 128"),
    "priority": ({"priority": 101}, "priority", "between -100 and 100"),
    "cache_salt": ({"cacheSalt": "x" * 129}, "cache_salt", "the limit is 128"),
    "session": ({"sessionId": "x" * 129}, "session_id", "the limit is 128"),
    "hints": ({"kvHints": {"actions": [{}] * 17}}, "kv_hints.actions", "the limit is 16"),
    "n": ({"n": 17}, "n", "between 1 and 16"),
    "logprobs": ({"numTopLogprobs": 21}, "num_top_logprobs", "at most 20"),
    "prompt logprobs": ({"numPromptLogprobs": 21}, "num_prompt_logprobs", "at most 20"),
    "temperature": ({"sampling": {"temperature": -1}}, "sampling.temperature", "between 0 and 100"),
    "top_p": ({"sampling": {"topP": 0}}, "sampling.top_p", "above 0"),
    "min_p": ({"sampling": {"minP": 2}}, "sampling.min_p", "between 0 and 1"),
    "frequency": (
        {"sampling": {"frequencyPenalty": 3}},
        "sampling.frequency_penalty",
        "between -2 and 2",
    ),
    "presence": (
        {"sampling": {"presencePenalty": "NaN"}},
        "sampling.presence_penalty",
        "between -2 and 2",
    ),
    "repetition": (
        {"sampling": {"repetitionPenalty": 0}},
        "sampling.repetition_penalty",
        "above 0",
    ),
    "bias": (
        {"sampling": {"logitBias": {"5": 101}}},
        "sampling.logit_bias[5]",
        "between -100 and 100",
    ),
    "max_tokens": ({"stop": {"maxTokens": 0}}, "stop.max_tokens", "at least 1"),
    "min_tokens": ({"stop": {"minTokens": 5}}, "stop.min_tokens", "at most max_tokens"),
    "stop string": ({"stop": {"stopStrings": [""]}}, "stop.stop_strings[0]", "must not be empty"),
    "stop token": (
        {"stop": {"stopTokenIds": [99999]}},
        "stop.stop_token_ids[0]",
        "not in the vocabulary",
    ),
    "stop without text": (
        {"stop": {"stopStrings": ["a"]}, "skipText": True},
        "stop.stop_strings",
        "skip_text",
    ),
    "no grammar": ({"structuredOutput": {}}, "structured_output", "one of json_schema and regex"),
    "bad regex": (
        {"structuredOutput": {"regex": "("}},
        "structured_output.regex",
        "unclosed group",
    ),
    "bad schema": (
        {"structuredOutput": {"jsonSchema": "{"}},
        "structured_output.json_schema",
        "is not JSON",
    ),
    "no such keyword": (
        {"structuredOutput": {"jsonSchema": '{"not": {}}'}},
        "structured_output.json_schema",
        "not",
    ),
    "large schema": (
        {"structuredOutput": {"regex": "x" * 65537}},
        "structured_output.regex",
        "the limit is 65536",
    ),
    "grammar and length": (
        {"structuredOutput": {"regex": "a"}, "stop": {"minTokens": 2}},
        "stop.min_tokens",
        "structured_output",
    ),
    "grammar without end": (
        {"structuredOutput": {"regex": "a"}, "stop": {"ignoreEos": True}},
        "stop.ignore_eos",
        "structured_output",
    ),
}


async def failure(
    outsider: Outsider, method: str, request: Json, timeout_s: float = 60
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        _ = [response async for response in outsider.ask(method, request, timeout_s=timeout_s)]
    return failed.value


async def test_a_message_over_the_limit_is_refused_before_it_is_read(outsider: Outsider) -> None:
    refused = await failure(outsider, GENERATE, merged(SHORT, {"text": "x" * (1 << 20)}))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in (refused.details() or "")
    assert "1048576" in (refused.details() or "")


@pytest.mark.parametrize("name", REFUSED)
async def test_bad_input_is_refused_by_field(outsider: Outsider, name: str) -> None:
    change, field, text = REFUSED[name]
    error = await failure(outsider, GENERATE, merged(SHORT, change))
    details = details_of(error)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == (
        "INVALID_REQUEST",
        "baton",
    )
    (violation,) = details["BadRequest"].field_violations
    assert violation.field == field
    assert text in violation.description


async def test_other_refusals_have_codes_of_their_own(outsider: Outsider) -> None:
    missing = await failure(outsider, GENERATE, merged(SHORT, {"model": "gpt-42"}))
    assert missing.code() is grpc.StatusCode.NOT_FOUND
    assert details_of(missing)["ErrorInfo"].reason == "UNKNOWN_MODEL"
    late = await failure(
        outsider, GENERATE, merged(SHORT, {"stop": {"maxTokens": 100, "ignoreEos": True}}), 0.01
    )
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    long = merged(SHORT, {"requestId": "twice", "stop": {"maxTokens": 1800, "ignoreEos": True}})
    first = asyncio.create_task(ask(outsider, long))
    running: list[Json] = []
    while not running or not running[0].get("runningRequests"):
        running = [
            status async for status in outsider.ask("baton.v1.Generation.GetClusterStatus", {})
        ]
    twice = await failure(outsider, GENERATE, long)
    assert twice.code() is grpc.StatusCode.ALREADY_EXISTS
    assert details_of(twice)["ErrorInfo"].reason == "DUPLICATE_REQUEST_ID"
    aborted = [
        answer
        async for answer in outsider.ask(
            "baton.v1.Generation.Abort", {"requestIds": ["twice", "no"]}
        )
    ]
    assert aborted == [{"aborted": ["twice"]}]
    assert (await first).finishes[0]["reason"] == "FINISH_REASON_ABORTED"


async def test_each_choice_equals_a_single_request_with_its_seed(outsider: Outsider) -> None:
    """The rule is the proto's: (seed + i * 0x9E3779B97F4A7C15) modulo 2^64."""
    hot = {"sampling": {"temperature": 3, "seed": "5"}, "stop": {"maxTokens": 12}, "n": 3}
    together = await ask(outsider, hot)
    for index in range(3):
        seed = (5 + index * 0x9E3779B97F4A7C15) % 2**64
        alone = await ask(outsider, merged(hot, {"n": 1, "sampling": {"seed": str(seed)}}))
        chunks = [
            r["chunk"] for r in together.responses if "chunk" in r and r.get("index", 0) == index
        ]
        assert [token for chunk in chunks for token in chunk.get("tokenIds", [])] == alone.token_ids


async def test_services_describe_themselves(outsider: Outsider) -> None:
    assert outsider.services() >= {
        "baton.v1.Generation",
        "vllm.grpc.engine.VllmEngine",
        "xds.service.orca.v3.OpenRcaService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    (info,) = [i async for i in outsider.ask("baton.v1.Generation.GetModelInfo", {})]
    assert (info["model"], info["hasTokenizer"], info["hasChatTemplate"]) == ("model", True, True)
    assert re.fullmatch("[0-9a-f]+", info["revision"])
    for service in ("", "baton.v1.Generation", "vllm.grpc.engine.VllmEngine"):
        (health,) = [
            h async for h in outsider.ask("grpc.health.v1.Health.Check", {"service": service})
        ]
        assert health["status"] == "SERVING"


async def test_load_is_reported_per_call_and_out_of_band(outsider: Outsider) -> None:
    (idle,) = [answer async for answer in outsider.ask("baton.v1.Generation.GetLoad", {})]
    assert (idle["prefillWorkers"], idle["decodeWorkers"], idle.get("waitingRequests", 0)) == (
        1,
        1,
        0,
    )
    assert int(idle["kvTokensTotal"]) > 1000

    async def ask_on() -> None:
        while True:
            assert (
                len(
                    (
                        await ask(outsider, {"stop": {"maxTokens": 120, "ignoreEos": True}, "n": 4})
                    ).finishes
                )
                == 4
            )

    busy, peak, reports = asyncio.create_task(ask_on()), 0.0, 0
    async for report in outsider.ask(
        "xds.service.orca.v3.OpenRcaService.StreamCoreMetrics",
        {"reportInterval": "0.1s"},
        timeout_s=120,
    ):
        peak, reports = max(peak, report.get("applicationUtilization", 0.0)), reports + 1
        assert set(report["utilization"]) == {"kv_cache", "running_requests"}
        if busy.done() or (peak > 0 and reports > 1):
            break
    assert not busy.done()
    busy.cancel()
    assert (peak > 0, reports > 1) == (True, True)


async def test_channelz_shows_the_server(outsider: Outsider) -> None:
    stub = channelz_pb2_grpc.ChannelzStub(outsider.channel)
    servers = (await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=60)).server
    assert any(server.data.calls_started > 0 for server in servers)
