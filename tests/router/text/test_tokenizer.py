"""Files of a model directory to ids; chat templates as transformers renders them."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Encoding

from router.text.chat import Chat, chat_of_texts
from router.text.chat_template import ChatTemplate
from router.text.model_facts import load_served_model
from router.text.tokenizer import INLINE_CHARACTERS, TextTokenizer, load_text_tokenizer
from runtime.errors import ConfigError, InvalidRequestError
from tests.router.harness import EOS, byte_level_tokenizer, write_model_dir
from tests.support.router.fake_workers import VOCAB_SIZE


def test_a_directory_without_tokenizer_serves_ids_only(tmp_path: Path) -> None:
    (write_model_dir(tmp_path) / "tokenizer.json").unlink()
    model = load_served_model(tmp_path)
    assert model.text_tokenizer is None
    assert model.facts.name == tmp_path.name


async def test_long_texts_give_the_same_ids_as_short_ones() -> None:
    text_tokenizer, word = TextTokenizer(byte_level_tokenizer(), None), "mill "
    ids = await text_tokenizer.encode_text(word * INLINE_CHARACTERS)
    assert ids == byte_level_tokenizer().encode(word * INLINE_CHARACTERS).ids


class Watched:
    """A tokenizer that records its threads. It has no `encode`, which blocks all threads."""

    decoder = None

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
        self.threads.append(threading.current_thread())
        return byte_level_tokenizer().encode_batch(texts, add_special_tokens=add_special_tokens)


LONG = "mill " * INLINE_CHARACTERS


@pytest.mark.parametrize(
    ("chat", "inline"),
    [
        (chat_of_texts(("user", "red")), True),
        (chat_of_texts(("user", LONG)), False),
        (chat_of_texts((LONG, "red")), False),
        (chat_of_texts(*[("user", "")] * INLINE_CHARACTERS), False),
        (Chat((), ({"type": LONG},)), False),
        (Chat((), arguments={"x": [{"y": LONG}]}), False),
    ],
)
async def test_long_chats_leave_the_event_loop_alone(chat: Chat, inline: bool) -> None:  # noqa: FBT001
    watched: Any = Watched()
    await TextTokenizer(watched, ChatTemplate("{{ messages | length }}", {})).encode_chat(chat)
    assert [thread is threading.current_thread() for thread in watched.threads] == [inline]


async def test_chat_goes_through_template_and_tokenizer(tmp_path: Path) -> None:
    text_tokenizer = load_text_tokenizer(write_model_dir(tmp_path))
    assert text_tokenizer is not None
    token_ids = await text_tokenizer.encode_chat(chat_of_texts(("user", "red")))
    assert token_ids == byte_level_tokenizer().encode("<user>red<bot>").ids


async def test_chat_without_template_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await TextTokenizer(byte_level_tokenizer(), None).encode_chat(
            chat_of_texts(("user", "red"))
        )


def test_a_template_file_beats_the_config_and_named_ones_have_a_default(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    text_tokenizer = load_text_tokenizer(tmp_path)
    assert text_tokenizer is not None
    assert text_tokenizer.has_chat_template
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError):
        load_text_tokenizer(tmp_path)


def test_facts_come_from_the_config_files(tmp_path: Path) -> None:
    facts = load_served_model(write_model_dir(tmp_path), "mine").facts
    assert (facts.name, facts.vocab_size, facts.max_context_tokens, facts.num_layers) == (
        "mine",
        VOCAB_SIZE,
        256,
        4,
    )
    assert facts.eos_token_ids == (EOS,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert load_served_model(tmp_path).facts.eos_token_ids == (3, 4)


def test_the_models_sampling_defaults_are_read_unless_disabled(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "num_beams": 4})
    )
    model = load_served_model(tmp_path)
    assert (model.facts.sampling, len(model.notices)) == ({"temperature": 0.6}, 1)
    model = load_served_model(tmp_path, own_sampling=False)
    assert (model.facts.sampling, model.notices) == ({}, ())
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": "hot"}))
    assert load_served_model(tmp_path, own_sampling=False).facts.eos_token_ids == (EOS,)
    with pytest.raises(ConfigError, match="temperature must be between 0 and 100, is 'hot'"):
        load_served_model(tmp_path)


def test_a_model_without_an_end_token_is_logged_once(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (notice,) = load_served_model(tmp_path).notices
    assert notice.startswith("no file of the model states an end-of-sequence token")


def test_facts_of_a_nested_language_model(tmp_path: Path) -> None:
    text = {
        "vocab_size": 9,
        "max_position_embeddings": 8,
        "num_hidden_layers": 7,
        "eos_token_id": 0,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Multi"], "text_config": text})
    )
    facts = load_served_model(tmp_path).facts
    assert (facts.vocab_size, facts.max_context_tokens, facts.num_layers, facts.eos_token_ids) == (
        9,
        8,
        7,
        (0,),
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"vocab_size": 0}'),
        ("config.json", "[" * 100_000),
        ("config.json", '{"text_config": 5}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("chat_template.jinja", "\udcff"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    (write_model_dir(tmp_path) / name).write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match=name.split(".")[0]):
        load_served_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "most"),
    [("vocab_size", 1 << 24), ("max_position_embeddings", 1 << 24), ("num_hidden_layers", 10_000)],
)
@pytest.mark.parametrize("excess", [1, 10**15])
def test_numbers_that_no_model_has_are_refused(
    tmp_path: Path, name: str, most: int, excess: int
) -> None:
    """A router reported ready but served nothing: no message carries such a context."""
    path = write_model_dir(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: most + excess}))
    with pytest.raises(
        ConfigError, match=f"{name} must be an integer from 1 to {most}, is {most + excess}"
    ):
        load_served_model(tmp_path)


@pytest.mark.parametrize("eos", ["x", -3, [2, -3], 1e9, [VOCAB_SIZE], True])
def test_end_of_sequence_ids_that_no_token_has_are_refused(tmp_path: Path, eos: object) -> None:
    (write_model_dir(tmp_path) / "generation_config.json").write_text(
        json.dumps({"eos_token_id": eos})
    )
    with pytest.raises(
        ConfigError, match=f"eos_token_id must be ids from 0 to {VOCAB_SIZE - 1}, got"
    ):
        load_served_model(tmp_path)


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_served_model(tmp_path)
