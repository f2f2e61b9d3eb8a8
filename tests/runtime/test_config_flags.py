"""Flags that are generated from settings."""

import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.testing import CliRunner, Result

from baton.cli import app as baton_app
from baton.gateway import GatewayConfig
from baton.gateway import app as gateway_app
from baton.up_command import UpConfig
from pool.main import worker_command
from pool.stage.config import WorkerConfig
from router.command import app as router_app
from router.config import RouterConfig
from runtime.config import Config
from runtime.config_flags import Flags, command_of, flags_of

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


class FinalSettings(Config):
    size: int = Field(default=3, ge=1, le=9, description="how large")
    is_on: bool = Field(default=True, description="whether it is on")
    folder: Path = Field(default_factory=Path.cwd, description="where it is")
    file: Annotated[Path | None, typer.Option("--config")] = Field(
        default=None, description="The file."
    )
    host: Annotated[str, typer.Option(envvar="SOME_HOST", help="A host.")] = "here"
    port: Annotated[int | None, typer.Option(show_default="a free one")] = Field(
        default=None, description="A port."
    )


def final(*arguments: str, **environment: str) -> tuple[dict[str, object], object, Result]:
    """Return what a command of `FinalSettings` gets, its context's object, and the result."""
    got: list[tuple[dict[str, object], object]] = [({}, None)]
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command()
    @command_of(FinalSettings)
    def run(context: typer.Context, flags: Flags) -> None:
        """Run it."""
        got.append((dict(flags), context.obj))

    done = CliRunner().invoke(app, arguments, obj="object", env=environment)
    return *got[-1], done


def test_flags_without_a_file_have_the_defaults_of_their_settings() -> None:
    flags, context_object, done = final()
    assert (done.exit_code, context_object) == (0, "object")
    assert FinalSettings(folder=Path()) == FinalSettings.model_validate({**flags, "folder": Path()})
    assert flags["folder"] is None  # load() calls the factory


def test_an_option_of_a_field_adds_a_name_and_a_variable() -> None:
    flags, _, _ = final("--config", "f", "--no-is-on", "--size", "9", SOME_HOST="there")
    assert (flags["file"], flags["is_on"], flags["size"]) == (Path("f"), False, 9)
    assert flags["host"] == "there"


@pytest.mark.parametrize("size", ["0", "10"])
def test_a_flag_outside_the_limits_of_its_setting_is_a_usage_error(size: str) -> None:
    _, _, done = final("--size", size)
    assert done.exit_code == 2
    assert "Invalid value for '--size'" in done.output


def test_the_help_of_a_command_is_that_of_its_function_and_its_settings() -> None:
    text = " ".join(final("--help")[2].output.split())
    for part in ("Run it.", "How large. [default: 3; 1<=x<=9]", "[default: is-on]", "A host."):
        assert part in text
    assert "[default: (a free one)]" in text


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


def test_every_setting_of_up_has_a_flag_with_its_description() -> None:
    group = typer.main.get_command(baton_app)
    assert isinstance(group, TyperGroup)
    options = {
        option.name: option
        for option in group.commands["up"].params
        if isinstance(option, TyperOption)
    }
    assert options.keys() == UpConfig.model_fields.keys()
    told = {name: field.description for name, field in UpConfig.model_fields.items()}
    shared = {"tls_ca", "tls_cert", "tls_key", "tls_name", "token_file"}  # with other commands
    assert {name for name, text in told.items() if text is None} == shared
    assert all(options[name].help == text for name, text in told.items() if text is not None)
    assert options["config_file"].opts == ["--config"]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("baton gen", "generate"),
        ("baton generate --temp", "--temperature"),
        ("baton up --decode-d", "--decode-dp-attention"),
    ],
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
