"""Prompts of recorded conversations: which tokens they share, and that they go on with responses."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from baton.load_run import named_sessions
from baton.transcripts import Transcript, recorded_requests
from baton.values import ModelInfo
from baton.workload import Planned, Tokens, Turn

INFO = ModelInfo(
    "m", "M", 256, 64, 1, (7,), has_tokenizer=False, has_chat_template=False, revision=""
)


def sent(*turns: tuple[Planned, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the prompts of turns that are answered with these tokens."""
    transcript = Transcript(Tokens(INFO, 1))
    prompts = []
    for index, (item, response) in enumerate(turns):
        query = transcript.query(item, index)
        transcript.answered(item, query, response)
        assert query.stop.max_tokens == item.output_tokens
        prompts.append(cast(tuple[int, ...], query.prompt))
    return prompts


def turn(prompt_tokens: int, *blocks: int, output_tokens: int = 3) -> Planned:
    return Planned(0.0, prompt_tokens, output_tokens, blocks, turn=Turn(0), block_tokens=4)


def test_a_prompt_goes_on_with_the_response_before_it() -> None:
    """The first prompt ends within its third block, which the recording names otherwise later."""
    first, second = sent((turn(10, 1, 2, 3), (97, 98, 99)), (turn(18, 1, 2, 4, 5), ()))
    assert second[:13] == (*first, 97, 98, 99)
    assert (len(first), len(second)) == (10, 18)


def test_a_prompt_may_end_within_the_response() -> None:
    first, second = sent((turn(10, 1, 2), (97, 98, 99)), (turn(11, 1, 2), ()))
    assert second == (*first, 97)


def test_a_prompt_that_parts_from_another_has_only_the_blocks_before() -> None:
    first, second = sent((turn(10, 1, 2, 3), (97, 98, 99)), (turn(14, 1, 6, 7), ()))
    assert second[:4] == first[:4]
    assert second[4:8] != first[4:8]
    assert 97 not in second


def test_a_later_turn_goes_on_with_an_earlier_branch() -> None:
    """The third turn goes on with the first, and the fourth with the second."""
    first, second, third, fourth = sent(
        (turn(8, 1, 2), (91, 92)),
        (turn(4, 9), (93, 94)),
        (turn(12, 1, 2, 3), (95, 96)),
        (turn(8, 9, 10), ()),
    )
    assert third[:10] == (*first, 91, 92)
    assert fourth[:6] == (*second, 93, 94)


def test_conversations_share_blocks_of_the_same_number_and_no_other() -> None:
    planned = [
        Planned(0.0, 8, 2, (1, 2), turn=Turn(session), block_tokens=4) for session in range(2)
    ]
    planned.append(Planned(0.0, 8, 2, (1, 3), turn=Turn(2), block_tokens=4))
    one, two, three = (
        request.query().prompt for request in recorded_requests(INFO, planned, seed=1)
    )
    assert one == two
    assert one[:4] == three[:4]
    assert one[4:] != three[4:]


def test_the_turns_of_a_conversation_may_name_its_session() -> None:
    """The last one ends it; a request of no conversation names none."""
    planned = [
        Planned(float(at), 4, 2, (), turn=None if session is None else Turn(session, number))
        for at, (session, number) in enumerate(((0, 0), (1, 0), (None, 0), (0, 1)))
    ]
    queries = [
        request.query()
        for request in named_sessions(recorded_requests(INFO, planned, seed=1), "run")
    ]
    assert [(query.session_id, query.ends_session) for query in queries] == [
        ("run-0", False),
        ("run-1", True),
        ("", False),
        ("run-0", True),
    ]


def test_requests_without_a_turn_are_those_of_no_conversation() -> None:
    (request,) = recorded_requests(INFO, [Planned(2.0, 8, 2, (1,))], seed=1)
    assert (request.at_s, request.session, request.after) == (2.0, None, ())
    assert len(request.query().prompt) == 8


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.integers(0, 2), max_size=8), st.integers(0, 9)),
        max_size=12,
    )
)
def test_equal_whole_blocks_have_equal_tokens(
    drawn: list[tuple[int, list[int], int]],
) -> None:
    """Whatever turns name, prompts have their lengths, and two that begin with the same whole blocks
    begin with the same tokens. A block is named by all tokens up to its end."""
    numbers: dict[tuple[int, ...], int] = {}
    items = [
        (
            turn(
                count,
                *(
                    numbers.setdefault(tuple(path[: end + 1]), len(numbers))
                    for end in range(len(path))
                ),
            ),
            tuple(range(100, 100 + length)),
        )
        for count, path, length in drawn
    ]
    prompts = sent(*items)
    for (item, _), prompt in zip(items, prompts, strict=True):
        assert len(prompt) == item.prompt_tokens
        assert set(prompt) <= set(range(INFO.vocab_size))
    whole = [item.blocks[: item.prompt_tokens // 4] for item, _ in items]
    for one, first in zip(whole, prompts, strict=True):
        for other, second in zip(whole, prompts, strict=True):
            count = 0
            while count < min(len(one), len(other)) and one[count] == other[count]:
                count += 1
            assert first[: 4 * count] == second[: 4 * count]
