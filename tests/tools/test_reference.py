"""The reference pages are what the code gives now."""

import ast
import re

import pytest
import typer
from typer.core import TyperGroup

from baton.cli import app
from tests.architecture.source import modules
from tools.reference import PAGES, ROOT


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (ROOT / name).read_text() == PAGES[name](), "run python -m tools.reference"


def test_every_setting_and_flag_has_a_description() -> None:
    rows = [
        line.split(" | ")
        for line in PAGES["docs/configuration.md"]().splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) > 100
    assert [row[0] for row in rows if not row[-1].removesuffix("|").strip()] == []


def test_every_flag_that_a_message_names_is_one() -> None:
    roles = modules("decode", "engine", "models", "pool", "prefill", "router", "transfer").values()
    texts = [
        node.value
        for tree in roles
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert len(named) > 20
    assert named <= set(re.findall(r"`(--[a-z-]+)`", PAGES["docs/configuration.md"]()))


def test_every_command_is_there_and_values_are_spelled() -> None:
    page = PAGES["docs/configuration.md"]()
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    documented = set(re.findall(r"^### `baton ([a-z]+)(?: [A-Z]+)*`$", page, re.MULTILINE))
    assert documented == group.commands.keys() - {
        "router",
        "prefill",
        "decode",
        "worker",
        "gateway",
        "planner",
    }
    assert [line for line in page.splitlines() if re.search(r"\| `[(\[<][^|]*` \|", line)] == []
