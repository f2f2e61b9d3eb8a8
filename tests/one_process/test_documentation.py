"""Commands of the user pages work: every block is run here or gives a reason why not.

A block of commands has no language, or `sh`; one of Python is `python`. A comment before it may say

    <!-- not run: WHY -->                        what it needs that a test has not
    <!-- run by tests/FILE.py -->                which other test plays it

Pictures are `text`, transcripts `console` (tests/cluster/test_first_minutes.py), other formats have
their own tests.
"""

import asyncio
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup, TyperOption

from baton.cli import app
from baton.cluster_config import demo_model
from baton.gateway import app as gateway_app
from planner.command import app as planner_app
from sim.command import app as simulate_app
from sim.plan import app as plan_app
from tests.support.cluster.one_process import cluster_in_process

ROOT = Path(__file__).parent.parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("README.md")),
)
ADDRESS = "127.0.0.1:7000"
COMMANDS = ("", "sh")
OTHERS = ("text", "console", "toml", "yaml")
_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block and the comment right before it."""

    page: str
    language: str
    text: str
    note: str

    @property
    def is_run_here(self) -> bool:
        return self.language in (*COMMANDS, "python") and not self.note.startswith(
            ("not run: ", "run by ")
        )


def blocks() -> list[Block]:
    return [
        Block(str(page.relative_to(ROOT)), found["language"], found["text"], found["note"] or "")
        for page in PAGES
        for found in _BLOCK.finditer(page.read_text())
    ]


async def run(command: list[str], folder: Path, target: str) -> str:
    """Run a block and return its output. It finds the cluster at the default address, as for a
    reader of the page."""
    environment = {
        **os.environ,
        "BATON_TARGET": target,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, f"{command[-1]}\n{output.decode()}"
    return output.decode()


async def test_blocks_of_commands_and_code_run(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(
        '{"at_s": 0, "prompt_tokens": 9, "output_tokens": 4}\n'
        '{"at_s": 1, "prompt_tokens": 30, "output_tokens": 8}\n'
    )
    turns = [
        {
            "t": 4.0 * index,
            "in": 512 * (index + 1),
            "out": 40,
            "hash_ids": [*range(8 * (index + 1))],
        }
        for index in range(2)
    ]
    (tmp_path / "agents.jsonl").write_text(f"{json.dumps({'requests': turns})}\n" * 2)
    (tmp_path / "token").write_text("the-token-of-this-test\n")
    said: dict[str, list[str]] = {}
    mine = [block for block in blocks() if block.is_run_here]
    assert {block.page for block in mine} >= {
        "README.md",
        "docs/quickstart.md",
        "docs/client.md",
        "docs/load.md",
    }
    async with cluster_in_process(demo_model()) as client:
        (target,) = client.targets
        for block in sorted(
            mine, key=lambda block: block.language == "python"
        ):  # it reads what commands have made
            command = (
                [sys.executable, "-W", "error", "-c", block.text.replace(ADDRESS, target)]
                if block.language == "python"
                else ["bash", "-euc", block.text]
            )
            said.setdefault(block.page, []).append(await run(command, tmp_path, target))
    streamed, collected, several, *_ = said["docs/client.md"]
    assert re.search(r"\n (stop|length) \d+ tokens\n$", streamed)
    assert re.search(r" (stop|length) \[-\d.*\]\n$", collected)
    assert re.fullmatch(r"\[('.*'(, )?){3}\]\n", several)
    assert any(output.startswith("sampling.temperature") for output in said["docs/client.md"])
    usage = said["docs/client.md"][-1]
    assert re.fullmatch(
        r"Usage\(prompt_tokens=\d+, completion_tokens=\d+, cached_tokens=0, "
        r"pulled_tokens=0, disk_tokens=0, host_tokens=0, server_tokens=0\)\n",
        usage,
    ), "one of two routers is not there"
    assert " 3 5 7 9 11" in said["README.md"][0]
    assert " % met TTFT <= 500 ms and TPOT <= 50 ms" in said["docs/load.md"][0]
    assert (tmp_path / "run.png").stat().st_size


def test_blocks_that_are_not_run_say_why() -> None:
    for block in blocks():
        assert block.language in (*COMMANDS, *OTHERS, "python"), (
            f"{block.page}: what is {block.language!r}?"
        )
        kind, _, rest = (
            block.note.partition(": ")
            if block.note.startswith("not run")
            else block.note.rpartition(" ")
        )
        if kind == "not run":
            assert len(rest) > 20, f"{block.page}: why is this not run?\n{block.text}"
        elif kind == "run by":
            assert (ROOT / rest).is_file(), f"{block.page}: {rest} runs nothing"
        elif block.language == "console":
            assert block.page == "docs/first-minutes.md"


def command_lines() -> list[tuple[str, str]]:
    """Yield every `baton ...` of every block, with its page."""
    found = []
    for block in blocks():
        if block.language in COMMANDS:
            for line in block.text.replace("\\\n", " ").splitlines():
                for part in line.partition(" # ")[0].partition(" > ")[0].split(" | "):
                    if part.strip().startswith("baton "):
                        found.append((block.page, part.strip()))
    return found


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_commands_in_the_pages_have_the_flags_they_are_given(page: str, line: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    words = shlex.split(line)
    apart = {
        "gateway": gateway_app,
        "planner": planner_app,
        "simulate": simulate_app,
        "plan": plan_app,
    }
    command = (
        typer.main.get_command(apart[words[1]]) if words[1] in apart else group.commands[words[1]]
    )
    known = {
        opt for option in command.params if isinstance(option, TyperOption) for opt in option.opts
    }
    assert {word for word in words[2:] if word.startswith("--")} <= known, f"{page}: {line}"


def test_there_are_commands_to_look_at() -> None:
    assert len(command_lines()) > 15
