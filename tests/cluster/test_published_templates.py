"""Templates of published models through the gateway: the model sees what transformers renders."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.router.harness import byte_level_tokenizer
from tests.support.router.gateway import gateway
from tests.support.router.recorder import Recorder, serving, write_text_model
from tests.support.texts.chats import (
    CONVERSATIONS,
    SPECIAL_TOKENS,
    Conversation,
    expected_rendering,
)
from tests.support.texts.published import published_templates

pytestmark = pytest.mark.long  # they are fetched
# Of each family one; all of them are rendered in tests/router/text/test_published_templates.py.
FAMILIES = (
    "cohere",
    "cohere2",
    "deepseek_r1_distill",
    "deepseekv3",
    "gemma",
    "gemma3",
    "gemma4",
    "gemma4_v3",
    "glm4moe",
    "idefics3",
    "lfm2",
    "lfm2_2_5",
    "llama3",
    "llama3_1",
    "llama3_2",
    "nemotron_3_nano",
    "phi3",
    "phi3_5",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "qwen3_6",
    "qwen3_instruct_2507",
    "qwen3_vl",
)


def as_gateways_send_it(conversation: Conversation) -> Conversation:
    """Replace a single text part by its text."""

    def single(content: Any) -> Any:  # noqa: ANN401 - of a message
        return content[0]["text"] if isinstance(content, list) and len(content) == 1 else content

    return replace(
        conversation,
        messages=tuple(
            {**message, "content": single(message["content"])} for message in conversation.messages
        ),
    )


async def test_the_model_sees_the_prompt_rendered_by_transformers(tmp_path: Path) -> None:
    templates, tokenizer = published_templates(), byte_level_tokenizer()
    recorders = {
        name: Recorder(
            write_text_model(tmp_path / name, tokenizer, templates[name], SPECIAL_TOKENS)
        )
        for name in FAMILIES
    }
    async with AsyncExitStack() as stack:
        addresses = [
            await stack.enter_async_context(serving(recorder)) for recorder in recorders.values()
        ]
        address = await stack.enter_async_context(gateway(addresses, tmp_path))
        http = await stack.enter_async_context(
            httpx2.AsyncClient(base_url=f"http://{address}", timeout=60)
        )
        async with asyncio.timeout(120):
            while len((await http.get("/v1/models")).json()["data"]) < len(recorders):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for name, recorder in recorders.items():
            for asked, conversation in CONVERSATIONS.items():
                recorder.prompts.clear()
                answer = await http.post(
                    "/v1/chat/completions",
                    json={"model": name, "max_tokens": 1, **conversation.as_request()},
                )
                expected = expected_rendering(
                    templates[name], as_gateways_send_it(conversation).as_chat()
                )
                found = [
                    tokenizer.decode(prompt, skip_special_tokens=False)
                    for prompt in recorder.prompts
                ]
                assert found == ([] if expected is None else [expected]), (name, asked, answer.text)
                assert answer.status_code == (400 if expected is None else 200), (
                    name,
                    asked,
                    answer.text,
                )
