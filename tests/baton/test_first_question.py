"""Suggested first requests."""

import json
import shlex
from dataclasses import replace

import pytest

from baton.first_question import FirstQuestion
from baton.values import ModelInfo

OWN = ModelInfo(
    "mine", "Llama", 300, 64, 1, (7,), has_tokenizer=True, has_chat_template=True, revision=""
)
COMPLETES = replace(OWN, has_chat_template=False)


@pytest.mark.parametrize(
    ("model", "words", "path", "asked"),
    [
        (
            None,
            '--chat "Count from 3 by 2."',
            "chat/completions",
            {"messages": [{"role": "user", "content": "Count from 3 by 2."}]},
        ),
        (
            OWN,
            '--chat "Hello!" --max-tokens 64',
            "chat/completions",
            {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64},
        ),
        (
            COMPLETES,
            '"Once upon a time" --max-tokens 32',
            "completions",
            {"prompt": "Once upon a time", "max_tokens": 32},
        ),
    ],
)
def test_both_apis_are_asked_the_same_question(
    model: ModelInfo | None, words: str, path: str, asked: dict[str, object]
) -> None:
    question = FirstQuestion.of(model)
    assert question.words() == words
    program, url, header, content_type, flag, data = shlex.split(
        question.curl("127.0.0.1:8000", "mine")
    )
    assert (program, url, header, flag) == ("curl", f"http://127.0.0.1:8000/v1/{path}", "-H", "-d")
    assert content_type == "content-type: application/json"
    assert json.loads(data) == {"model": "mine", "temperature": 0, **asked}


def test_a_gateway_with_keys_is_shown_one() -> None:
    words = shlex.split(FirstQuestion.of(None).curl("127.0.0.1:8000", "m", has_keys=True))
    assert words[4:6] == ["-H", "authorization: Bearer $BATON_API_KEY"]


def test_a_model_without_a_tokenizer_is_asked_in_token_ids() -> None:
    assert (
        FirstQuestion.of(replace(COMPLETES, has_tokenizer=False)).words()
        == "--ids 1,2,3 --max-tokens 8"
    )


def test_curl_bypasses_a_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert (
        FirstQuestion.of(None)
        .curl("127.0.0.1:8000", "m")
        .startswith("curl --noproxy '*' http://127.0.0.1:8000/")
    )
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert (
        FirstQuestion.of(None).curl("127.0.0.1:8000", "m").startswith("curl http://127.0.0.1:8000/")
    )
