"""Recordings of agents: what a request waits for, by hand."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from baton.replays import begun, impatient, shrunk, superposed
from baton.traces import Trace, read_trace
from baton.workload import Arrivals, Planned, Process, TooLong, Turn, fitted
from runtime.errors import ConfigError


def entry(t: float, prompt: int, output: int, blocks: list[int], **others: float) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": prompt, "out": output, "hash_ids": blocks, **others}


def recording(*requests: dict[str, Any], **others: object) -> dict[str, Any]:
    return {"id": "x", "block_size": 4, "hash_id_scope": "local", "requests": requests, **others}


def of(path: Path, *recordings: dict[str, Any]) -> Trace:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in recordings))
    return read_trace(path)


# A sub-agent of two requests begins 1 s after the first response, and the agent waits for it.
WITH_A_SUB_AGENT = (
    entry(0.0, 9, 3, [7, 8], api_time=2.0),
    {
        "t": 3.0,
        "type": "subagent",
        "requests": [
            entry(0.0, 5, 1, [9], api_time=1.0),
            entry(4.0, 8, 1, [9, 10], api_time=1.5, think_time=2.6),
        ],
    },
    entry(20.0, 13, 2, [7, 8, 11], api_time=1.0, think_time=18.0),
)
TURNS = (
    (9, Turn(0, 0, (), 0.0)),
    (5, Turn(0, 1, (0,), 1.0)),
    (8, Turn(0, 2, (1,), 2.6)),
    (13, Turn(0, 3, (2,), 11.5)),
)


def test_a_request_waits_for_the_responses_it_waited_for_in_the_recording(tmp_path: Path) -> None:
    trace = of(tmp_path / "trace.jsonl", recording(*WITH_A_SUB_AGENT))
    assert not trace.is_timed
    assert [(item.prompt_tokens, item.turn) for item in trace.planned] == list(TURNS)
    assert [item.at_s for item in trace.planned] == [0.0, 3.0, 7.0, 20.0]
    assert [item.blocks for item in trace.planned] == [(0, 1), (2,), (2, 3), (0, 1, 4)]
    assert {item.block_tokens for item in trace.planned} == {4}


def test_times_of_sub_agents_may_count_from_the_start_of_the_conversation(tmp_path: Path) -> None:
    first, agent, last = WITH_A_SUB_AGENT
    inner = cast(list[dict[str, Any]], agent["requests"])
    later = [{**each, "t": each["t"] + 3.0} for each in inner]
    trace = of(tmp_path / "trace.jsonl", recording(first, {**agent, "requests": later}, last))
    assert [(item.prompt_tokens, item.turn) for item in trace.planned] == list(TURNS)


def test_parallel_requests_wait_for_the_same_response_and_the_next_for_all(tmp_path: Path) -> None:
    trace = of(
        tmp_path / "trace.jsonl",
        recording(
            entry(0.0, 4, 1, [1], api_time=5.0),
            entry(10.0, 5, 1, [1], api_time=6.0),
            entry(10.2, 6, 1, [1], api_time=9.0),
            entry(30.0, 7, 1, [1], api_time=1.0),
        ),
    )
    turns = [item.turn for item in trace.planned]
    assert [turn and turn.after for turn in turns] == [(), (0,), (0,), (1, 2)]
    assert [turn and round(turn.pause_s, 3) for turn in turns] == [0.0, 5.0, 5.2, 10.8]


def test_a_request_sent_beside_the_first_waits_for_nothing(tmp_path: Path) -> None:
    trace = of(
        tmp_path / "trace.jsonl",
        recording(entry(0.0, 4, 1, [1], api_time=5.0), entry(2.0, 5, 1, [2], api_time=6.0)),
    )
    assert [item.turn for item in trace.planned] == [Turn(0, 0), Turn(0, 1, (), 2.0)]


def test_without_times_of_responses_requests_follow_each_other(tmp_path: Path) -> None:
    trace = of(
        tmp_path / "trace.jsonl",
        recording(
            entry(0.0, 4, 1, []), entry(9.0, 5, 1, [], think_time=4.0), entry(12.0, 5, 1, [])
        ),
    )
    assert [item.turn for item in trace.planned] == [
        Turn(0, 0),
        Turn(0, 1, (0,), 4.0),
        Turn(0, 2, (1,), 0.0),
    ]


def test_blocks_are_common_to_conversations_only_if_their_ids_are_global(tmp_path: Path) -> None:
    one, two = recording(entry(0.0, 8, 1, [5, 6])), recording(entry(0.0, 8, 1, [5, 7]))
    local = of(tmp_path / "local.jsonl", one, two)
    assert [item.blocks for item in local.planned] == [(0, 1), (2, 3)]
    common = [{**each, "hash_id_scope": "global"} for each in (one, two)]
    assert [item.blocks for item in of(tmp_path / "common.jsonl", *common).planned] == [
        (0, 1),
        (0, 2),
    ]


def test_a_folder_has_a_conversation_in_each_file(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(
            json.dumps(recording(entry(0.0, ord(name), 1, [1])), indent=2)
        )
    (tmp_path / "README.md").write_text("no trace")
    folder, one = read_trace(tmp_path), read_trace(tmp_path / "b.json")
    assert [item.prompt_tokens for item in folder.planned] == [97, 98]
    assert [item.prompt_tokens for item in one.planned] == [98]


def test_requests_without_a_response_are_counted(tmp_path: Path) -> None:
    trace = of(
        tmp_path / "trace.jsonl",
        recording(
            entry(0.0, 4, 1, [1], api_time=1.0),
            entry(2.0, 5, 0, [1], api_time=1.0),
            entry(9.0, 6, 1, [1], api_time=1.0),
        ),
    )
    assert [item.turn for item in trace.planned] == [Turn(0, 0), Turn(0, 1, (0,), 8.0)]
    assert trace.num_unanswered == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"requests": [{"t": 0, "in": 1}]}, "needs requests with t, in, out"),
        ({"requests": 3}, "needs requests with"),
        ({"requests": [entry(0.0, 4, 1, [])], "block_size": 0}, "block_size must be at least 1"),
        ({"requests": [entry(float("nan"), 4, 1, [])]}, "times must be finite"),
        ({"requests": [entry(0.0, -4, 1, [])]}, "lengths must be from 1"),
        ({"requests": [{**entry(0.0, 4, 1, []), "in": float("inf")}]}, "needs requests with"),
        ({"requests": []}, "has no requests"),
    ],
)
def test_damaged_recordings_are_refused_by_name(
    tmp_path: Path, values: dict[str, object], said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    with pytest.raises(ConfigError, match=rf"trace\.jsonl.*{said}"):
        of(path, values)


def test_lines_of_a_session_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"session_id": "a", "timestamp": 1000, "input_length": 5, "output_length": 2}\n'
        '{"session_id": "a", "delay": 500, "input_length": 9, "output_length": 1}\n'
        '{"session_id": "b", "timestamp": 1200, "input_length": 7, "output_length": 1}\n'
        '{"session_id": "a", "timestamp": 4500, "input_length": 12, "output_length": 1}\n'
    )
    trace = read_trace(path, speed=2.0)
    assert trace.is_timed
    assert [(item.prompt_tokens, item.at_s, item.turn) for item in trace.planned] == [
        (5, 0.0, Turn(0)),
        (7, pytest.approx(0.1), Turn(1)),
        (9, pytest.approx(0.25), Turn(0, 1, (0,), 0.25)),
        (12, 1.75, Turn(0, 2, (1,), 1.5)),
    ]


LOAD = (
    Planned(0.0, 40, 4, (1,), turn=Turn(0)),
    Planned(3.0, 900, 4, (1, 2), turn=Turn(0, 1, (0,), 2.0)),
    Planned(9.0, 48, 4, (1, 3), turn=Turn(0, 2, (1,), 70.0)),
    Planned(0.0, 16, 4, (4,), turn=Turn(1)),
)


def test_turns_after_a_skipped_one_wait_for_those_before_it() -> None:
    kept = fitted(LOAD, 64, TooLong.SKIP)
    assert kept.num_skipped == 1
    assert [item.turn for item in kept.planned] == [Turn(0), Turn(0, 2, (0,), 70.0), Turn(1)]


def test_conversations_begin_at_random_times() -> None:
    moved = begun(LOAD, Arrivals(Process.CONSTANT, rate=0.5), seed=0)
    assert [(item.at_s, item.turn) for item in moved] == [
        (0.0, Turn(0)),
        (2.0, Turn(1)),
        (3.0, Turn(0, 1, (0,), 2.0)),
        (9.0, Turn(0, 2, (1,), 70.0)),
    ]


def test_copies_have_conversations_of_their_own() -> None:
    together = superposed(begun(LOAD, Arrivals(rate=0.5), seed=0), 2, seed=0)
    first_s = {item.turn.session: item.at_s for item in reversed(together) if item.turn is not None}
    assert sorted(first_s) == [0, 1, 2, 3]
    later = [item.at_s - first_s[item.turn.session] for item in together if item.turn]
    assert sorted(map(round, later)) == [0, 0, 0, 0, 3, 3, 9, 9]


def test_pauses_and_lengths_are_cut() -> None:
    assert [item.turn and item.turn.pause_s for item in impatient(LOAD, 60.0)] == [0, 2, 60, 0]
    assert [
        (item.prompt_tokens, item.output_tokens, item.block_tokens) for item in shrunk(LOAD, 32)
    ] == [(1, 1, 16), (28, 1, 16), (1, 1, 16), (1, 1, 16)]
    with pytest.raises(ConfigError, match="shrink must divide the 512 tokens"):
        shrunk(LOAD, 3)
    assert shrunk([Planned(0.0, 30, 6)], 3) == [Planned(0.0, 10, 2, block_tokens=170)]
