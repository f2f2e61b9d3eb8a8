"""The check of commit subjects."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.commit_subject import problem_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "message",
    [
        "Bound the decompressed size of messages",
        "Feed drafts from the cache",
        "Apply limits per client\n\nOne client could take all places.",
        'Revert "The old way"',
        "x" * 0 + "Y" + "e" * 71,
    ],
)
def test_imperative_subjects_pass(message: str) -> None:
    assert problem_of(message) is None


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("", "empty"),
        ("Y" + "e" * 72, "73 characters"),
        ("Bound messages.", "period"),
        ("Bound messages\nand parts", "must be empty"),
        ("bound messages", "capital"),
        ("What a client may hold", "'What'"),
        ("The router bounds messages", "'The'"),
        ("Bounding messages", "'Bounding'"),
        ("Added a bound", "'Added'"),
    ],
)
def test_others_are_refused_with_the_reason(message: str, problem: str) -> None:
    assert problem in (problem_of(message) or "")


def test_the_hook_names_the_problem_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "message"
    file.write_text("The router bounds messages\n\nBody\n# a comment of git\n")
    command = [sys.executable, "-m", "tools.commit_subject", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "imperative" in done.stderr
