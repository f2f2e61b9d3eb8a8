"""Hits of a trace of a few prompts, counted by hand."""

import json
import sys
from pathlib import Path

import pytest

from bench.cache_bound import main as cache_bound
from bench.cache_policy import main as cache_policy
from bench.cache_policy import read_agents, read_trace, replay

# A conversation of two turns, another one that begins with the same block, and the first one's
# second turn again.
PROMPTS = (
    (0, 40, (1, 2, 3)),
    (1000, 60, (1, 2, 4, 5)),
    (2000, 40, (1, 6, 7)),
    (3000, 60, (1, 2, 4, 5)),
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at_ms, "input_length": length, "hash_ids": ids}
        for at_ms, length, ids in PROMPTS
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def token_hit(path: Path, capacity: int, state_tokens: int) -> float:
    found = replay(read_trace(path, 16), capacity, state_tokens, 16)["token_hit"]
    assert isinstance(found, float)
    return found


def test_without_states_every_known_block_hits(trace: Path) -> None:
    """Blocks of 16: 40 tokens are two whole ones, 60 are three. Found are none, 2, 1 and 3 of
    them."""
    assert token_hit(trace, 1024, 0) == (0 + 2 + 1 + 3) * 16 / 200


def test_with_states_a_prompt_resumes_at_ends_and_branches(trace: Path) -> None:
    """States after (1, 2), (1, 2, 4) and, where the third prompt parts from these, (1): too late
    for itself."""
    assert token_hit(trace, 1024, 20) == (0 + 2 + 0 + 3) * 16 / 200


def test_a_cache_that_is_too_small_gives_up_the_oldest(trace: Path) -> None:
    """Three pages: the third prompt evicts the block of the second alone, since it needs a page."""
    assert token_hit(trace, 48, 0) == (0 + 2 + 1 + 2) * 16 / 200


# The first agent has three turns with nothing in common. They come between the second and the third
# turn of the other one, whose second turn drops the end of its first, and whose third is the same.
AGENTS: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {
    "0.json": [(30, 33, (1, 2)), (31, 33, (3, 4)), (32, 33, (5, 6))],
    "1.json": [(0, 65, (1, 2, 3, 4)), (1, 65, (1, 2, 3, 5)), (50, 65, (1, 2, 3, 5))],
}


@pytest.mark.parametrize(("sessions", "hits"), [("none", 3 + 3), ("odd", 3 + 4)])
def test_a_session_keeps_its_newest_turn(sessions: str, hits: int, tmp_path: Path) -> None:
    """Eight pages of 16 tokens: three of eleven are evicted, first those that are used once. With its
    session named, the second agent loses only the end of its first turn."""
    for name, calls in AGENTS.items():
        requests = [{"t": t, "in": n, "out": 1, "hash_ids": ids} for t, n, ids in calls]
        (tmp_path / name).write_text(json.dumps({"block_size": 16, "requests": requests}))
    prompts = read_agents(tmp_path, 0.1, sessions, 300.0, tell_ends=False)
    assert replay(prompts, 128, 0, 16)["token_hit"] == hits * 16 / 294


@pytest.mark.parametrize(
    ("lines", "flags", "named"),
    [
        (None, ("--capacity", "100000"), "cannot read the trace"),
        (
            '{"timestamp": 0, "input_length": 5}\n',
            ("--capacity", "100000"),
            "trace.jsonl:1: needs timestamp",
        ),
        (
            '{"timestamp": -1, "input_length": 5, "hash_ids": []}\n',
            ("--capacity", "100000"),
            "jsonl:1: timestamp must",
        ),
        ("", ("--capacity", "0"), "--capacity: must be a whole number from 1 on, got '0'"),
        (
            "",
            ("--capacity", "8", "--block-tokens", "x"),
            "--block-tokens: must be a whole number from 1 on, got 'x'",
        ),
        ("", ("--capacity", "100"), "capacity must be at least"),
        (
            '{"timestamp": 0, "input_length": 40, "hash_ids": [1, 2, 3]}\n',
            ("--capacity", "16", "--state-tokens", "0", "--block-tokens", "16"),
            "does not fit into 1 pages of 16",
        ),
    ],
)
def test_an_unusable_trace_gets_one_line(
    lines: str | None,
    flags: tuple[str, ...],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "trace.jsonl"
    if lines is not None:
        path.write_text(lines)
    monkeypatch.setattr("sys.argv", ["cache_policy", str(path), *flags])
    with pytest.raises(SystemExit) as ended:
        sys.exit(cache_policy())
    assert ended.value.code in {1, 2}
    written = capsys.readouterr()
    assert not written.out
    assert named in written.err


def test_a_trace_that_is_not_there_ends_the_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cache_bound", "absent.jsonl"])
    with pytest.raises(SystemExit) as ended:
        cache_bound()
    assert ended.value.code == 2
    assert "cannot read the trace absent.jsonl" in capsys.readouterr().err
