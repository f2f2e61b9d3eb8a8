"""Flags that are generated from settings."""

import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Literal

import pytest
import typer
from pydantic import Field
from typer.core import TyperCommand, TyperOption
from typer.testing import CliRunner

from baton.gateway import GatewayConfig
from baton.gateway import app as gateway_app
from pool.main import worker_command
from pool.stage.config import WorkerConfig
from router.command import app as router_app
from router.config import RouterConfig
from runtime.config import Config
from runtime.config_flags import Flags, flags_of

ROOT = Path(__file__).resolve().parents[2]


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Settings(Config):
    model: Path = Field(description="where it is")
    color: Color = Field(default=Color.RED, description="Which color.")
    size: Literal["small", "large"] = Field(default="small", description="how large")
    limit_s: float | None = Field(default=None, gt=0, description="seconds")
    names: tuple[str, ...] = Field(default=(), description="names")
    is_on: bool = Field(default=True, description="whether it is on")


def given(arguments: list[str]) -> tuple[dict[str, object], Path | None, bool]:
    """Return what a command of `Settings` gets from these arguments."""
    got: list[tuple[dict[str, object], Path | None, bool]] = []
    app = typer.Typer(add_completion=False)

    @app.command()
    @flags_of(Settings, section="settings")
    def run(flags: Flags, file: Path | None, checks_only: bool) -> None:  # noqa: FBT001
        got.append((dict(flags), file, checks_only))

    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (one,) = got
    return one


def test_flags_that_are_not_given_are_none() -> None:
    assert given([]) == (dict.fromkeys(Settings.model_fields), None, False)


def test_values_have_the_types_of_their_settings() -> None:
    arguments = "--model a/b --color blue --size large --limit-s 2 --names x --names y --no-is-on"
    flags, file, checks_only = given([*arguments.split(), "--config", "f", "--check-settings"])
    assert flags == {
        "model": Path("a/b"),
        "color": Color.BLUE,
        "size": "large",
        "limit_s": 2.0,
        "names": ["x", "y"],
        "is_on": False,
    }
    assert (file, checks_only) == (Path("f"), True)


@pytest.mark.parametrize(
    ("config", "app"),
    [
        (RouterConfig, router_app),
        (WorkerConfig, worker_command("decode", lambda flags, file: 0)),
        (GatewayConfig, gateway_app),
    ],
    ids=["router", "worker", "gateway"],
)
def test_every_setting_has_a_flag_with_its_description(
    config: type[Config], app: typer.Typer
) -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand)
    options = {option.name: option for option in command.params if isinstance(option, TyperOption)}
    assert set(options) == {*config.model_fields, "config", "check_settings"}
    for name, field in config.model_fields.items():
        assert field.description, name
        assert (options[name].help or "").lower().rstrip(".") == field.description.lower().rstrip(
            "."
        )


@pytest.mark.parametrize(
    ("words", "completed"),
    [("baton gen", "generate"), ("baton generate --temp", "--temperature")],
)
def test_the_shell_completes_commands_and_flags(words: str, completed: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv[0] = 'baton'; import baton.__main__ as m; m.main()",
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "_BATON_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed in done.stdout.split(), done.stderr
