"""The command as its page shows it, and its errors for invalid flags."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim.command import app, parse_slo

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
TRACE = (
    '{"timestamp": 0, "input_length": 900, "output_length": 4, "hash_ids": [1, 2]}\n'
    '{"timestamp": 4000, "input_length": 1500, "output_length": 8, "hash_ids": [1, 3, 4]}\n'
)


def test_the_lines_of_its_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(TRACE)
    for content, name in re.findall(r"^echo '(.*)' > (.*)$", PAGE.read_text(), re.MULTILINE):
        Path(name).write_text(content)
    lines = re.findall(r"^baton simulate (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) == 6
    said = []
    for line in lines:
        done = CliRunner().invoke(app, [*shlex.split(line), "--plot", "run.png"])
        assert done.exit_code == 0, done.output
        assert Path("run.png").stat().st_size
        said.append(done.stdout)
    assert "20 requests in " in said[0]
    assert " 0 failed" in said[1]
    figures = json.loads(said[2])
    assert figures["policy"] == "least_load"
    assert figures["cached_share"] == 512 / 2400
    assert "200 requests in " in said[3]


def test_the_first_thing_to_try_is_a_fleet_that_keeps_up() -> None:
    """Without flags 68 of 1000 requests failed."""
    done = CliRunner().invoke(app, ["--json"])
    figures = json.loads(done.stdout)
    assert (figures["requests"], figures["failed"]) == (1000, 0)
    assert figures["slo_attainment"] > 0.95


def test_azures_and_burst_gpts_tables_are_loads(tmp_path: Path) -> None:
    """The demo context of a simulated model is 131,072 tokens."""
    table = tmp_path / "trace.csv"
    table.write_text(
        "Timestamp,Model,Request tokens,Response tokens\n5,m,900,2\n6,m,200000,3\n7,m,100,0\n8,m,5,3\n"
    )
    refused = CliRunner().invoke(app, ["--trace", str(table)])
    assert refused.exit_code == 2
    assert "1 of 3 requests are longer than the context of 131072 tokens" in refused.stderr
    done = CliRunner().invoke(app, ["--trace", str(table), "--too-long", "skip", "--json"])
    assert json.loads(done.stdout)["requests"] == 2
    assert done.stderr == (
        "requests skipped as longer than the context of 131072 tokens: 1\n"
        "requests skipped as the trace has no response to them: 1\n"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--slo", "ttft=2"], "--slo must be like ttft=2s,tpot=50ms"),
        (["--slo", "ttft=2s,tpot=fast"], "--slo must be"),
        (["--slo", "ttft=nan,tpot=1s"], "--slo must be"),
        (["--slo", "ttft=1s,tpot=inf"], "--slo must be"),
        (["--fault", "kill"], "a fault is like"),
        (["--fault", "kill:decode-9@1"], "there is no decode-9"),
        (["--trace", "missing.jsonl"], "missing.jsonl"),
        (["--costs", "missing.json"], "missing.json"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(app, ["--requests", "1", *arguments])
    assert done.exit_code == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_cost_that_cannot_be_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"decode": {"step_s": -1}}')
    done = CliRunner().invoke(app, ["--costs", str(path)])
    assert done.exit_code == 2
    assert "decode.step_s" in done.stderr


def test_limits_have_units() -> None:
    assert parse_slo("ttft=2s,tpot=50ms") == parse_slo("tpot=0.05,ttft=2000ms")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--slower", "inf"],
        ["--slower", "nan"],
        ["--watch-interval", "inf"],
        ["--rate", "inf"],
        ["--rate", "nan"],
        ["--speed", "inf"],
    ],
)
def test_numbers_without_end_are_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["--requests", "1", *arguments])
    assert done.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in done.stderr


def test_turns_of_an_agent_follow_their_responses(tmp_path: Path) -> None:
    """Two conversations at a second's distance; the later turns begin 4 s after the responses, for
    which the recording took 60 s, and find all whole blocks of the turn before."""
    blocks = list(range(40))
    turns = [
        {"t": 0.0, "in": 1280, "out": 4, "hash_ids": blocks[:20], "api_time": 60.0},
        {"t": 64.0, "in": 2560, "out": 4, "hash_ids": blocks, "api_time": 1.0},
    ]
    (tmp_path / "one.json").write_text(json.dumps({"requests": turns}))
    (tmp_path / "two.json").write_text(json.dumps({"requests": turns}))
    flags = ["--trace", str(tmp_path), "--rate", "1", "--arrival", "constant", "--json"]
    done = CliRunner().invoke(app, flags)
    figures = json.loads(done.stdout)
    assert (figures["requests"], figures["failed"]) == (4, 0)
    assert 5 < figures["duration_s"] < 10
    assert figures["cached_share"] == 2 * 1280 / (2 * 3840)
    # Two copies of the trace have conversations of their own.
    twice = json.loads(CliRunner().invoke(app, [*flags, "--copies", "2"]).stdout)
    assert (twice["requests"], twice["cached_share"]) == (8, figures["cached_share"])


def test_turns_after_a_lost_one_are_not_asked(tmp_path: Path) -> None:
    """The only decode worker is gone for good before the second of three turns."""
    turns = [
        {"t": 10.0 * index, "in": 640, "out": 4, "hash_ids": [], "api_time": 1.0}
        for index in range(3)
    ]
    (tmp_path / "one.json").write_text(json.dumps({"requests": turns}))
    done = CliRunner().invoke(
        app, ["--trace", str(tmp_path), "--fault", "kill:decode-0@5", "--json"]
    )
    figures = json.loads(done.stdout)
    assert (figures["requests"], figures["failed"]) == (2, 1)
