"""Progress of a response: each token once, and the next attempt requests the rest."""

from dataclasses import replace

from baton.retry import AnswerSoFar
from baton.values import (
    Chunk,
    Finish,
    FinishReason,
    PromptLogprobs,
    Query,
    Sampling,
    Timings,
    TokenLogprobs,
    Usage,
)

USAGE = Usage(1, 1)


def chunk(
    *token_ids: int, text: str = "", index: int = 0, scores: PromptLogprobs | None = None
) -> Chunk:
    return Chunk("r", token_ids, text, (), USAGE, scores, index)


def finish(index: int = 0) -> Finish:
    return Finish("r", FinishReason.LENGTH, None, None, USAGE, Timings(), index)


def scores(first: int, count: int) -> PromptLogprobs:
    positions = range(first, first + count)
    return PromptLogprobs(
        first,
        tuple(positions),
        tuple(TokenLogprobs(-float(position), ()) for position in positions),
    )


def test_a_seed_is_generated_for_sampling_and_kept() -> None:
    drawn = iter(range(5, 9))

    def seed_of(query: Query) -> int | None:
        answer = AnswerSoFar(query, lambda: next(drawn))
        answer.news(chunk(3))
        return answer.query().sampling.seed

    assert [seed_of(Query("x")), seed_of(Query("x", Sampling(temperature=0.5)))] == [5, 6]
    assert seed_of(Query("x", Sampling(seed=1))) == 1
    assert seed_of(Query("x", Sampling(temperature=0))) is None


def test_the_next_attempt_carries_the_output_of_every_choice() -> None:
    answer = AnswerSoFar(Query("x", n=3), lambda: 0)
    assert answer.query().resumed == ()
    for event in (chunk(4, index=2), chunk(5, 6, index=2), chunk(7), finish(2)):
        assert answer.news(event) == [event]
    assert answer.query().resumed == ((7,), (), (4, 5, 6))
    assert answer.query().request_id == "r", "what the first server chose"
    assert not answer.is_whole
    assert answer.news(finish(2)) == [], "it comes again"
    answer.news(finish(0))
    answer.news(finish(1))
    assert answer.is_whole


def test_a_resumed_request_is_resumed_again_from_its_end() -> None:
    answer = AnswerSoFar(Query("x", request_id="mine", resumed=((1, 2),)), lambda: 0)
    answer.news(chunk(3))
    assert answer.query().resumed == ((1, 2, 3),)
    assert answer.query().request_id == "mine"


def test_text_alone_waits_for_its_finish() -> None:
    answer = AnswerSoFar(Query("x"), lambda: 0)
    rest = chunk(text="rest")
    assert answer.news(rest) == []
    answer.query()  # the stream broke
    assert answer.news(rest) == []
    assert answer.news(finish()) == [rest, finish()]


def test_scores_of_the_prompt_come_once() -> None:
    answer = AnswerSoFar(Query("x"), lambda: 0)
    assert answer.news(chunk(scores=scores(1, 3))) == [chunk(scores=scores(1, 3))]
    assert answer.news(chunk(scores=scores(1, 2))) == []
    assert answer.news(chunk(scores=scores(3, 4))) == [chunk(scores=scores(4, 3))]


def test_the_next_attempt_names_the_workers_of_earlier_tokens() -> None:
    answer = AnswerSoFar(Query("x", n=2), lambda: 7)
    first = Chunk("r", (5,), "a", (), USAGE, index=1, compatibility="new")
    answer.news(first)
    answer.news(
        replace(first, compatibility="other")
    )  # a later attempt's: it fits, or it had been refused
    assert answer.query().resumed_from == ("", "new")


def test_the_next_attempt_names_the_workers_of_earlier_scores() -> None:
    """Otherwise scores of one version of a model could come with tokens of another one."""
    answer = AnswerSoFar(Query("x", n=2), lambda: 7)
    named = replace(chunk(scores=scores(1, 3)), compatibility="new")
    assert answer.news(named) == [named]
    assert (answer.query().resumed, answer.query().resumed_from) == (((),), ("new",))
    again = replace(chunk(scores=scores(1, 4)), compatibility="new, elsewhere")
    assert answer.news(again) == [chunk(scores=scores(4, 1))], "the workers are named once"
    first = replace(chunk(5), compatibility="new, elsewhere")
    assert answer.news(first) == [replace(first, compatibility="new")], "and with the first token"
    assert answer.news(first) == [chunk(5)]
    assert (answer.query().resumed, answer.query().resumed_from) == (((5, 5),), ("new",))
