"""What the pages for users tell them to type works: client code against a running cluster, commands with flags."""

import asyncio
import re
import shlex
import sys
from pathlib import Path

import typer
from typer.core import TyperGroup, TyperOption

from baton.cli import app
from baton.cluster import demo_model
from baton.gateway import app as gateway_app
from tests.support.cluster.one_process import cluster_in_process

DOCS = Path(__file__).parent.parent.parent / "docs"
ADDRESS = "127.0.0.1:7000"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


async def run_python(code: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-W", "error", "-c", code,
                                                   stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_the_client_guides_python_runs() -> None:
    codes = blocks("client.md", "python")
    assert all(ADDRESS in code for code in codes)
    async with cluster_in_process(demo_model()) as client:
        here = client.targets[0]
        ran = [await run_python(code.replace(ADDRESS, here)) for code in codes]
    assert {code for code, _ in ran} == {0}, ran
    streamed, collected, several, refused, resumable = (output for _, output in ran)
    assert re.search(r"\n (stop|length) \d+ tokens\n$", streamed)
    assert re.search(r" (stop|length) \[-\d.*\]\n$", collected)
    assert re.fullmatch(r"\[('.*'(, )?){3}\]\n", several)
    assert refused.startswith("sampling.temperature")
    assert re.fullmatch(r"Usage\(prompt_tokens=\d+, completion_tokens=\d+\)\n", resumable), "one of two is not there"


def test_commands_in_the_pages_have_the_flags_they_are_given() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    seen = 0
    for page in DOCS.glob("*.md"):
        lines = (line for block in blocks(page.name, "") for line in block.replace("\\\n", " ").splitlines())
        for line in lines:
            if not line.startswith("baton "):
                continue
            words = shlex.split(line.partition(" > ")[0])
            seen += 1
            command = typer.main.get_command(gateway_app) if words[1] == "gateway" else group.commands[words[1]]
            known = {opt for option in command.params if isinstance(option, TyperOption) for opt in option.opts}
            assert {word for word in words[2:] if word.startswith("--")} <= known, f"{page.name}: {line}"
    assert seen > 8
