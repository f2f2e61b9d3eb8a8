"""The load of `bench.agents`: which turns it takes, and how much memory they would fill."""

import argparse

from baton.workload import Planned, Turn
from bench.agents import MAX_CONTEXT, chosen, left_tokens

FLAGS = argparse.Namespace(turns=2, shrink=2, max_pause=3.0, conversations=2, rate=0.5)


def turns(session: int, *prompts: int) -> list[Planned]:
    return [
        Planned(
            9.0 * number,
            prompt,
            20,
            tuple(100 * session + block for block in range(prompt // 64)),
            turn=Turn(session, number, (number - 1,) if number else (), 8.0 if number else 0.0),
            block_tokens=64,
        )
        for number, prompt in enumerate(prompts)
    ]


def test_conversations_with_enough_short_turns_are_taken_from_their_start() -> None:
    trace = [
        *turns(0, 640, 700, 900),
        *turns(1, 640),
        *turns(2, 640, 2 * MAX_CONTEXT),
        *turns(3, 256, 300),
        *turns(4, 256, 300),
    ]
    load = chosen(trace, FLAGS)
    assert [(item.turn and item.turn.session, item.at_s) for item in load] == [
        (0, 0.0),
        (3, 2.0),
        (0, 9.0),
        (3, 11.0),
    ]
    assert [item.turn and item.turn.pause_s for item in load] == [0.0, 0.0, 3.0, 3.0]
    assert [item.prompt_tokens for item in load] == [320, 128, 350, 150]


def test_common_blocks_are_counted_once() -> None:
    """Two turns with ten blocks of 32 tokens, of which the second repeats all, and 20 generated."""
    load = chosen(turns(0, 640, 660), FLAGS)
    assert left_tokens(load) == 10 * 32 + 2 * 10
