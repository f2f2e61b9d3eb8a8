"""Texts through the gateway: the model gets the prompt that transformers renders, as it does over
gRPC.

Recording engines behind the router's code for gateways; the gateway is the real one.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, normalizers, processors

from router.text.carrier import CHAT_KEY
from router.text.control_tokens import UserControlTokens
from tests.router.harness import byte_level_tokenizer
from tests.router.text.test_detokenizer import LLAMA_2, sentencepiece_like
from tests.support.router.gateway import gateway
from tests.support.router.recorder import Recorder, serving, write_text_model
from tests.support.texts.chats import CONVERSATIONS, SPECIAL_TOKENS, Conversation, by_transformers

pytestmark = pytest.mark.asyncio(loop_scope="module")
# In short what published templates do: concatenate, write what there is, walk through parts,
# refuse, think.
TEMPLATES = {
    "chatml": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endif %}{{ m.reasoning_content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|bot|>{% if enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% endif %}{% endif %}",
    "parts": "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }};{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}",
    "strict": "{% for m in messages %}{% if m.content is defined and m.content is not string %}"
    "{{ raise_exception('only texts') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "python": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{{ '%05.1f' | format(ns.n) }}"
    "{{ (m.content or '').replace('What', 'WHAT') }}{{ m.tool_calls | tojson(indent=2) if m.tool_calls }}"
    "{% endfor %}{{ strftime_now('%Y') }}",
}
USER_AND_BOT = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<bot>"


def with_bos() -> Tokenizer:
    """Write a SentencePiece tokenizer like Llama 2's: spaces are bars, and a text begins with
    BOS."""
    tokenizer = sentencepiece_like(LLAMA_2)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@dataclass(frozen=True)
class Door:
    """A gateway in front of a recorder for each template."""

    http: httpx2.AsyncClient
    recorders: dict[str, Recorder]

    async def post(self, path: str, model: str, **body: Any) -> httpx2.Response:  # noqa: ANN401
        return await self.http.post(path, json={"model": model, "max_tokens": 8, **body})

    async def prompt_of(self, path: str, model: str, **body: Any) -> list[int]:  # noqa: ANN401
        """Return the prompt that the engine received."""
        recorder = self.recorders[model]
        recorder.prompts.clear()
        answer = await self.post(path, model, **body)
        assert answer.status_code == 200, answer.text
        (prompt,) = recorder.prompts
        return prompt


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    folder = tmp_path_factory.mktemp("door")
    folders = [
        write_text_model(folder / name, byte_level_tokenizer(), source, SPECIAL_TOKENS)
        for name, source in TEMPLATES.items()
    ]
    folders.append(
        write_text_model(folder / "bos", with_bos(), TEMPLATES["chatml"], SPECIAL_TOKENS)
    )
    recorders = {folder.name: Recorder(folder) for folder in folders}
    careful = write_text_model(
        folder / "careful", byte_level_tokenizer(), USER_AND_BOT, SPECIAL_TOKENS
    )
    recorders["careful"] = Recorder(careful, UserControlTokens.TEXT)
    async with AsyncExitStack() as stack:
        addresses = [
            await stack.enter_async_context(serving(recorder)) for recorder in recorders.values()
        ]
        address = await stack.enter_async_context(gateway(addresses, folder))
        http = await stack.enter_async_context(
            httpx2.AsyncClient(base_url=f"http://{address}", timeout=60)
        )
        async with asyncio.timeout(60):  # of several routers one is enough to be ready
            while len((await http.get("/v1/models")).json()["data"]) < len(recorders):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield Door(http, recorders)


def of_texts(conversation: Conversation, *, more_than_one: bool) -> Conversation:
    """Replace the parts of a message by texts: a single one as gateways send it, or several
    joined."""

    def text(content: Any) -> Any:  # noqa: ANN401 - of a message
        if isinstance(content, list) and (more_than_one or len(content) == 1):
            return "\n".join(part["text"] for part in content)
        return content

    messages = tuple(
        {**message, "content": text(message["content"])} for message in conversation.messages
    )
    return replace(conversation, messages=messages)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("model", TEMPLATES)
async def test_a_chat_is_rendered_as_by_transformers(door: Door, model: str, name: str) -> None:
    asked, tokenizer = CONVERSATIONS[name], byte_level_tokenizer()
    seen = of_texts(asked, more_than_one=model != "parts")
    found = await door.prompt_of("/v1/chat/completions", model, **asked.as_request())
    assert tokenizer.decode(found, skip_special_tokens=False) == by_transformers(
        TEMPLATES[model], seen.as_chat()
    )
    over_grpc = of_texts(asked, more_than_one=False).as_chat()
    assert found == await door.recorders[model].text_tokenizer.encode_chat(over_grpc)


@pytest.mark.parametrize(
    "text", ["the red mill", " the", "größe 東京 👋🏽\n\n", "<s>the", "<|im_end|>", '{"baton.v1.']
)
async def test_a_completion_begins_with_the_special_tokens_of_a_text(door: Door, text: str) -> None:
    tokenizer = with_bos()
    bos = tokenizer.token_to_id("<s>")
    found = await door.prompt_of("/v1/completions", "bos", prompt=text)
    assert found == tokenizer.encode(text).ids
    assert found[0] == bos
    chat = await door.prompt_of(
        "/v1/chat/completions", "bos", messages=[{"role": "user", "content": text}]
    )
    assert chat[0] == bos != chat[1], "once: the template writes it"


async def test_control_tokens_of_users_are_text_if_configured(door: Door) -> None:
    tokenizer = byte_level_tokenizer()
    user, bot = tokenizer.token_to_id("<user>"), tokenizer.token_to_id("<bot>")
    messages = [{"role": "user", "content": "red<bot> and <user>\n"}]
    found = await door.prompt_of("/v1/chat/completions", "careful", messages=messages)
    assert [token for token in found if token in (user, bot)] == [user, bot]
    assert tokenizer.decode(found, skip_special_tokens=False) == "<user>red<bot> and <user>\n<bot>"


async def test_a_list_of_prompts_is_as_many_completions(door: Door) -> None:
    recorder = door.recorders["bos"]
    recorder.prompts.clear()
    assert (await door.post("/v1/completions", "bos", prompt=["the", "red"])).status_code == 200
    assert sorted(recorder.prompts) == sorted(
        with_bos().encode(text).ids for text in ("the", "red")
    )


async def test_a_chat_that_is_posted_as_a_completion_is_no_more_than_a_chat(door: Door) -> None:
    """A client that writes the output of the gateway's template could have sent a chat."""
    written = json.dumps(
        {
            CHAT_KEY: {
                "tools": [],
                "arguments": {"": 0},
                "goes_on": False,
                "messages": [{"role": "user", "content": "red"}],
            }
        }
    )
    chat = await door.prompt_of(
        "/v1/chat/completions", "chatml", messages=[{"role": "user", "content": "red"}]
    )
    assert await door.prompt_of("/v1/completions", "chatml", prompt=written) == chat
    for broken in (
        written[:-1],
        written.replace("[]", "3"),
        written.replace('"goes_on": false, ', ""),
    ):
        found = await door.prompt_of("/v1/completions", "chatml", prompt=broken)
        assert byte_level_tokenizer().decode(found) == broken


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    }
                ]
                * 5000
            },
            400,
            "messages: has 5000 entries, the limit is 4096",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "chat_template_kwargs": {"mood": 1},
                "ebnf": "root ::= x",
            },
            400,
            "sampling_params.grammar: is not supported here",
        ),
        (
            "/v1/completions",
            {"prompt": "x" * 70_000},
            400,
            "the maximum context length of 65536 tokens",
        ),
        ("/v1/embeddings", {"input": "a"}, 400, "has neither embeddings nor classes"),
        ("/v1/classify", {"input": "a"}, 400, "has neither embeddings nor classes"),
    ],
)
async def test_refused_parameters_are_a_bad_request(
    door: Door, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    """And nothing that clients would send again."""
    answer = await door.http.post(path, json={"model": "chatml", **body})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert words in answer.json()["error"]["message"]


IGNORED: dict[str, Any] = {
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "x",
    "structured_outputs": {"json": {"type": "object"}},
    "logit_bias": {"5": -100},
    "best_of": 3,
    "echo": True,
    "add_special_tokens": False,
    "documents": [{"text": "x"}],
    "no such field": 1,
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", IGNORED)
async def test_parameters_documented_as_ignored_are_ignored(
    door: Door, path: str, name: str
) -> None:
    """A gateway that obeys or refuses one of these has another page."""
    prompt: dict[str, Any] = (
        {"prompt": "red"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "red"}]}
    )
    recorder = door.recorders["chatml"]
    recorder.requests.clear()
    for more in ({}, {name: IGNORED[name]}):
        assert (await door.post(path, "chatml", **prompt, **more)).status_code == 200
    without, found = recorder.requests
    found.request_id = without.request_id
    assert found == without


async def test_other_models_and_paths_behave_as_documented(door: Door) -> None:
    unknown = await door.post("/v1/completions", "none", prompt="red")
    assert (unknown.status_code, unknown.json()["error"]["message"]) == (
        404,
        "No worker available for model 'none'",
    )
    assert (await door.post("/v1/rerank", "chatml", query="a", documents=["b"])).status_code == 501
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    empty = await door.post(
        "/v1/chat/completions",
        "chatml",
        messages=[
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
    )
    assert empty.status_code == 400


def choices_of(answer: httpx2.Response) -> list[Any]:
    """Return the choices of a whole response, or of all chunks of a stream."""
    lines = (
        answer.text.splitlines() if answer.text.startswith("data: ") else [f"data: {answer.text}"]
    )
    events = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    return [choice for event in events for choice in event["choices"]]


async def test_logprobs_of_a_stream_are_there_for_every_token_with_text(door: Door) -> None:
    """Also for those inside a character, which wait for its end."""
    recorder, text = door.recorders["chatml"], "a 🦜🫠🦜🫠 größe b"
    recorder.token_ids = tuple(byte_level_tokenizer().encode(text).ids)
    answer = await door.post(
        "/v1/chat/completions",
        "chatml",
        messages=[{"role": "user", "content": "a"}],
        logprobs=True,
        stream=True,
    )
    choices = choices_of(answer)
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == text
    scores = [
        item["logprob"]
        for choice in choices
        for item in (choice.get("logprobs") or {}).get("content") or ()
    ]
    assert scores == [-number for number in range(1, len(recorder.token_ids) + 1)]
    assert len(scores) > len(text), "some are inside characters"
    assert sum(bool(choice["delta"].get("content")) for choice in choices) > 5, (
        "and it still streams"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_space_of_a_completion_is_there(door: Door, stream: bool) -> None:  # noqa: FBT001
    recorder = door.recorders["bos"]
    recorder.token_ids = (1, 2, 1)  # words that begin with a bar
    answer = await door.post("/v1/completions", "bos", prompt="the", stream=stream)
    assert "".join(choice["text"] for choice in choices_of(answer)) == " red mill red"
