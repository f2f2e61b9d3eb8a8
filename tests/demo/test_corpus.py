"""The corpus is the same everywhere, and every question it asks can be answered from its story."""

import itertools
import re

import pytest

from demo import corpus
from demo.corpus import RecallQuestion


def take(seed: int, count: int) -> list[list[corpus.Piece]]:
    return list(itertools.islice(corpus.documents(seed, max_facts=5, task_share=0.3), count))


def test_the_same_seed_gives_the_same_documents() -> None:
    assert take(7, 50) == take(7, 50)
    assert take(7, 50) != take(8, 50)


def test_documents_end_once_and_mark_what_a_reader_could_know() -> None:
    for document in take(3, 200):
        text = "".join(piece.text for piece in document)
        assert text.endswith(corpus.END_OF_TEXT)
        assert text.count(corpus.END_OF_TEXT) == 1
        assert document[0].known is False
        assert document[1].known is True


def test_no_question_of_a_story_comes_twice() -> None:
    stories = [document for document in take(11, 200) if "Near " in document[0].text]
    assert len(stories) > 100
    for document in stories:
        questions = "".join(piece.text for piece in document if not piece.known)
        people = re.findall(r"(?:did|about) (\w+)", questions)
        assert len(people) == len(set(people))


def test_every_held_out_answer_occurs_in_its_story() -> None:
    for question in corpus.recall_questions(100, seed=5, max_facts=6):
        assert question.prompt.count(question.answer.strip().removesuffix(corpus.END)) == 1


def test_held_out_questions_are_repeatable_and_in_both_forms() -> None:
    questions = corpus.recall_questions(10, seed=0, max_facts=6)
    assert questions == corpus.recall_questions(10, seed=0, max_facts=6)
    assert [question.prompt.startswith(corpus.USER) for question in questions] == [True, False] * 5


@pytest.mark.parametrize("kind", range(5))
def test_speculation_prompts_have_long_answers(kind: int) -> None:
    prompts: list[RecallQuestion] = corpus.speculation_prompts(50, seed=0)[kind::5]
    lengths = [len(item.answer.split()) for item in prompts]
    assert sum(lengths) / len(lengths) >= 4
    assert all(
        item.prompt.endswith(corpus.ASSISTANT) and item.answer.endswith(corpus.END)
        for item in prompts
    )
