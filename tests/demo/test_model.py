"""The shipped checkpoint matches its card, in transformers and in Baton's engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.demo import ANSWER, QUESTION, STORY
from demo import corpus
from demo.corpus import RecallQuestion
from demo.evaluate_draft import SHAPES, measure
from demo.train import CURRICULUM, measure_recall
from models.drafts.loader import read_draft
from models.loader import read_model
from router.text.chat import chat_of_texts
from router.text.tokenizer import load_text_tokenizer
from tests.support.models.single_stage import StageDriver

MODEL = Path(__file__).parents[2] / "demo" / "model"
DRAFT = MODEL.parent / "draft"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((MODEL / "figures.json").read_text(encoding="utf-8"))
    return read


@pytest.mark.long
def test_held_out_accuracy_matches_the_card(figures: dict[str, Any]) -> None:
    """The first 40 of the card's questions, of both kinds."""
    assert figures["recall"] >= 0.95
    measured = measure_recall(MODEL, questions=40)
    assert measured["recall"] >= 0.95
    assert measured["recall_repeated_words"] == pytest.approx(
        figures["recall_repeated_words"], abs=0.15
    )


def test_cards_repeat_the_figures(figures: dict[str, Any]) -> None:
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    assert figures["steps"] == sum(phase.steps for phase in CURRICULUM)
    shown = [
        figures["date"],
        f"{figures['steps']} steps",
        f"{figures['tokens_seen']:,} tokens",
        f"{figures['parameters']:,}",
        f"{figures['vocabulary']} tokens",
        str(figures["answer_loss"]),
        *(f"{figures[name] * 100:.1f} %" for name in ("recall", "recall_repeated_words")),
    ]
    assert [text for text in shown if text not in card] == []


@pytest.mark.long
def test_draft_acceptance_matches_the_card() -> None:
    card = (DRAFT / "README.md").read_text(encoding="utf-8")
    measured = json.loads((DRAFT / "figures.json").read_text(encoding="utf-8"))["tokens_per_pass"]
    assert [
        shape for shape, tokens in measured.items() if f"| {shape} | {tokens} |" not in card
    ] == []
    assert measured["chain 3"] >= 2.7
    assert measured["tree 4x4/15"] >= 3.5
    seen = measure(MODEL, DRAFT, prompts=5, shapes={"chain 3": SHAPES["chain 3"]})[
        "tokens_per_pass"
    ]
    assert seen["chain 3"] == pytest.approx(measured["chain 3"], rel=0.15)


def spoken(tokenizer: Tokenizer, questions: list[RecallQuestion]) -> list[list[int]]:
    """Return the greedy output of the engine in two stages, all prompts in one batch, for the
    length of the right answers."""
    driver = StageDriver(read_model(MODEL), cuts=(3,), num_sequences=len(questions))
    lengths = [len(tokenizer.encode(question.answer).ids) for question in questions]
    logits = driver.prefill(
        {row: tokenizer.encode(question.prompt).ids for row, question in enumerate(questions)}
    )
    said: list[list[int]] = [[token] for token in logits.argmax(-1).tolist()]
    while running := [row for row, length in enumerate(lengths) if len(said[row]) < length]:
        logits = driver.decode({row: said[row][-1] for row in running})
        for row, token in zip(running, logits.argmax(-1).tolist(), strict=True):
            said[row].append(token)
    return said


def test_our_engine_answers_the_same_questions(tokenizer: Tokenizer) -> None:
    questions = corpus.recall_questions(20, seed=0, max_facts=4)
    answers = [tokenizer.encode(question.answer).ids for question in questions]
    right = sum(a == b for a, b in zip(spoken(tokenizer, questions), answers, strict=True))
    assert right >= 0.95 * len(questions)


def test_the_first_thing_a_person_sees_is_right(tokenizer: Tokenizer) -> None:
    """The question of `baton demo`."""
    prompt = f"{corpus.USER} {STORY} {QUESTION}{corpus.END}{corpus.ASSISTANT}"
    question = RecallQuestion(prompt, f" {ANSWER}{corpus.END}")
    assert spoken(tokenizer, [question]) == [tokenizer.encode(question.answer).ids]


async def test_the_router_renders_a_chat_as_training_did(tokenizer: Tokenizer) -> None:
    question = corpus.recall_questions(1, seed=0, max_facts=4)[0]
    content = question.prompt.removeprefix(f"{corpus.USER} ").removesuffix(
        f"{corpus.END}{corpus.ASSISTANT}"
    )
    text_tokenizer = load_text_tokenizer(MODEL)
    assert text_tokenizer is not None
    assert (
        await text_tokenizer.encode_chat(chat_of_texts(("user", content)))
        == tokenizer.encode(question.prompt).ids
    )


def test_the_draft_is_one_of_this_model() -> None:
    description = read_draft(DRAFT, read_model(MODEL))
    assert description.capture_layers == {1, 4, 6}


def test_files_are_small_and_name_no_machine() -> None:
    files = [path for folder in (MODEL, DRAFT) for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) < 6_000_000
    for path in files:
        if path.suffix != ".safetensors":
            text = path.read_text(encoding="utf-8")
            assert not [
                root for root in ("/tmp/", "/home/", "/root/", "/work/", "/Users/") if root in text
            ], path.name
