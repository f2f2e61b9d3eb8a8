"""Traces in the forms in which they are published. Lines of Azure's and BurstGPT's tables are as
their releases have them."""

from pathlib import Path

import pytest

from baton.traces import Trace, read_trace
from baton.workload import Planned
from runtime.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9305900,396,109\r
"""
AZURE_OF_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.259930+00:00,2399,6
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
BURST_GPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,a1,0.3,ChatGPT,472,18,490,Conversation log
5.0,b2,0.3,ChatGPT,10,2,12,Conversation log
"""


def test_traces_of_both_spellings_are_replayed(tmp_path: Path) -> None:
    ours, published = tmp_path / "ours.jsonl", tmp_path / "published.jsonl"
    ours.write_text(
        '{"at_s": 10, "prompt_tokens": 5, "output_tokens": 2}\n'
        '{"at_s": 13, "prompt_tokens": 9, "output_tokens": 1}\n'
    )
    published.write_text(
        '{"timestamp": 10000, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n\n'
        '{"timestamp": 13000, "input_length": 9, "output_length": 1, "hash_ids": []}\n'
    )
    assert read_trace(ours) == Trace((Planned(0.0, 5, 2), Planned(3.0, 9, 1)))
    assert read_trace(published) == Trace((Planned(0.0, 5, 2, (1,)), Planned(3.0, 9, 1)))
    assert read_trace(ours, speed=2.0).planned[1].at_s == 1.5
    assert read_trace(published, limit=1) == Trace((Planned(0.0, 5, 2, (1,)),))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "has no requests"),
        ("{", r"\.jsonl:1: needs at_s"),
        ('{"at_s": 1, "prompt_tokens": 3}', r"\.jsonl:1: needs"),
        ('{"at_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "lengths must be from 1"),
        ('{"at_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "times must be finite"),
        (
            '{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1, "hash_ids": [-1]}',
            "hash_ids must be from 0",
        ),
        ('{"at_s": 1e400, "prompt_tokens": 1, "output_tokens": 1}', "times must be finite"),
        (
            '{"at_s": 2, "prompt_tokens": 1, "output_tokens": 1}\n{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1}',
            "not in order of time",
        ),
    ],
)
def test_a_trace_that_cannot_be_used_is_refused_naming_the_line(
    tmp_path: Path, lines: str, said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (AZURE, Trace((Planned(0.0, 374, 44), Planned(4.25, 396, 109)))),
        ("\ufeff" + AZURE, Trace((Planned(0.0, 374, 44), Planned(4.25, 396, 109)))),
        (AZURE_OF_2024, Trace((Planned(0.0, 2162, 5), Planned(0.25, 2399, 6)))),
        (BURST_GPT, Trace((Planned(0.0, 472, 18), Planned(113.0, 417, 276)), num_unanswered=1)),
        (
            BURST_GPT_3,
            Trace((Planned(0.0, 10, 2), Planned(0.5, 472, 18))),
        ),  # by session, so not in order
    ],
)
def test_published_tables_are_read_as_they_are(tmp_path: Path, table: str, expected: Trace) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(table, encoding="utf-8", newline="")
    found = read_trace(path)
    assert found.num_unanswered == expected.num_unanswered
    assert [(item.prompt_tokens, item.output_tokens) for item in found.planned] == [
        (item.prompt_tokens, item.output_tokens) for item in expected.planned
    ]
    assert [item.at_s for item in found.planned] == pytest.approx(
        [item.at_s for item in expected.planned], abs=1e-5
    )


def test_a_limit_counts_requests_sent(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(BURST_GPT)
    assert read_trace(path, limit=2) == Trace(
        (Planned(0.0, 472, 18), Planned(113.0, 417, 276)), num_unanswered=1
    )
    assert read_trace(path, limit=1) == Trace((Planned(0.0, 472, 18),))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("yesterday,1,2", r"\.csv:2: needs TIMESTAMP, ContextTokens and GeneratedTokens"),
        ("5,1", r"\.csv:2: needs"),
        ("5,x,2", r"\.csv:2: needs"),
        ("5,-1,2", "lengths must be from 1"),
        ("inf,1,2", "times must be finite"),
        ("5,0,2", "has no requests"),
        ("", "has no requests"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_naming_the_line(
    tmp_path: Path, rows: str, said: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}\n")
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, said in ((".", "has no requests"), ("none", "No such file"), ("bytes", "utf-8")):
        with pytest.raises(ConfigError, match=said) as refused:
            read_trace(tmp_path / name)
        assert "\n" not in str(refused.value)
