"""End tokens and sampling of a model's files apply to every API: gRPC, the Python client, HTTP.

The shipped model as a fine-tuning tool would save it: the end token is named in
tokenizer_config.json alone, and generation_config.json asks for the most likely token.
"""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from baton.values import ChatMessage, FinishReason, Query, Sampling, Stop
from tests.support.cluster.clusters import RunningCluster, running_cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUESTION, PROMPT = "Count from 3 by 2.", "Near the library Ivan hid a red"
CHAT = (ChatMessage("user", QUESTION),)
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
END = 3  # <|end|> in the shipped model's tokenizer


def as_fine_tuned(folder: Path) -> Path:
    path = Path(
        shutil.copytree(Path(__file__).resolve().parents[2] / "demo" / "model", folder / "model")
    )
    config = json.loads((path / "config.json").read_text())
    del config["eos_token_id"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "eos_token_id": []})
    )
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningCluster]:
    async with running_cluster(
        as_fine_tuned(tmp_path_factory.mktemp("own")), http="127.0.0.1:0"
    ) as cluster:
        yield cluster
        await cluster.until_clean()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: RunningCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{running.cluster.http_address}/v1",
        api_key="none",
        max_retries=0,
        timeout=120,
    ) as client:
        yield client


async def test_clients_see_the_defaults(running: RunningCluster) -> None:
    info = await running.client.model_info()
    assert info.eos_token_ids == (END,)
    assert info.default_sampling == Sampling(
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=0,
        frequency_penalty=0,
        presence_penalty=0,
        repetition_penalty=1,
    )


async def test_a_request_without_options_is_greedy_and_ends_at_the_eos_token(
    running: RunningCluster,
) -> None:
    expected = await running.client.complete(Query(CHAT, Sampling(temperature=0)), timeout_s=120)
    assert (expected.finish.reason, expected.finish.stop_token_id) == (FinishReason.STOP, END)
    for _ in range(2):  # each with a seed of its own
        assert (
            await running.client.complete(Query(CHAT), timeout_s=120)
        ).token_ids == expected.token_ids
    hot = await running.client.complete(
        Query(CHAT, Sampling(temperature=50, seed=1), Stop(max_tokens=12)), timeout_s=120
    )
    assert hot.token_ids != expected.token_ids[:12]


async def test_http_gives_the_same_and_counts_no_token_beyond_the_end(
    running: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    expected = await running.client.complete(Query(CHAT), timeout_s=120)
    got = await client.chat.completions.create(model="model", messages=MESSAGES)
    assert got.choices[0].message.content == expected.text
    assert got.usage is not None
    assert got.usage.completion_tokens == expected.finish.usage.completion_tokens
    continued = await running.client.complete(
        Query(PROMPT, stop=Stop(max_tokens=12)), timeout_s=120
    )
    completed = await client.completions.create(model="model", prompt=PROMPT, max_tokens=12)
    assert completed.choices[0].text == continued.text


async def test_parameters_of_an_http_client_win(client: openai.AsyncOpenAI) -> None:
    greedy = await client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=12)
    hot = await client.chat.completions.create(
        model="model", messages=MESSAGES, max_tokens=12, temperature=2, seed=1
    )
    assert hot.choices[0].message.content != greedy.choices[0].message.content
