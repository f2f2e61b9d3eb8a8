"""Generator of docs/configuration.md from the settings models and the commands' flags."""

import enum
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import typer
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from baton.cli import app as baton_app
from baton.gateway import GatewayConfig
from baton.gateway import app as gateway_app
from planner.command import app as planner_app
from planner.config import PlannerConfig
from pool.check import app as check_app
from pool.main import worker_command
from pool.stage.config import WorkerConfig
from router.command import app as router_app
from router.config import RouterConfig
from runtime.config import Config
from sim.command import app as simulate_app
from sim.plan import app as plan_app
from worker.config import RolesConfig

_HEAD = """# Configuration

<!-- Made from the code by `python -m tools.reference`. -->

A process takes its settings from flags and from one TOML file (`--config`). Flags override the file, and the file
overrides defaults. The file has a table per role, so a whole cluster can share it. An unknown key is rejected. An
invalid value is rejected with an error that names the key and its limit. Effective settings are logged at start-up
(level debug).

```toml
[router]
max_waiting = 256

[decode]
max_running = 32
memory_mb = 4096
```

"""
_WORKERS = """`[prefill]` and `[decode]` have the same settings; each process of a pool gets its own `rank`. If flags
are absent, the variables of launchers are used (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

"""
_BOTH_ROLES = """`baton worker` runs a process of a pool that prefills, decodes, or does both with one copy of the
weights. `[worker]` has the settings of `[prefill]` and `[decode]`, except `local_rest_tokens`, and these:

"""
_COMMANDS = """`baton router`, `baton prefill`, `baton decode`, `baton worker`, `baton gateway` and `baton planner` take
the flags above. With `--check-settings` they only check the settings and exit. Every command has `--help`.

"""
# Commands implemented by programs of other packages, except those of the roles.
_PROGRAMS = {"check": check_app, "simulate": simulate_app, "plan": plan_app}


def configuration_page() -> str:
    router = typer.main.get_command(router_app)
    gateway = typer.main.get_command(gateway_app)
    worker = typer.main.get_command(worker_command("decode", lambda flags, file: 0))
    planner = typer.main.get_command(planner_app)
    both = typer.main.get_command(worker_command("worker", lambda flags, file: 0, RolesConfig))
    parts = [
        _HEAD,
        "## Router, `[router]`\n\n",
        *_settings(RouterConfig, _flags(router)),
        "\n## Prefill and decode workers, `[prefill]` and `[decode]`\n\n",
        _WORKERS,
        *_settings(WorkerConfig, _flags(worker)),
        "\n## Workers of both roles, `[worker]`\n\n",
        _BOTH_ROLES,
        *_settings(RolesConfig, _flags(both), without=WorkerConfig),
        "\n## Gateway, `[gateway]`\n\n",
        *_settings(GatewayConfig, _flags(gateway)),
        "\n## Planner, `[planner]`\n\n",
        *_settings(PlannerConfig, _flags(planner)),
        "\n## Commands of `baton`\n\n",
        _COMMANDS,
        *_commands(),
    ]
    return "".join(parts)


def _flags(command: object) -> Mapping[str, TyperOption]:
    assert isinstance(command, TyperCommand)
    return {
        option.name: option
        for option in command.params
        if isinstance(option, TyperOption) and option.name
    }


def _settings(
    model: type[Config], flags: Mapping[str, TyperOption], without: type[Config] = Config
) -> Iterator[str]:
    """Yield the table of a model's settings, except those that `without` has, too."""
    yield "| Setting | Flag | Default | Values | Meaning |\n|---|---|---|---|---|\n"
    for name, field in model.model_fields.items():
        if name in without.model_fields:
            continue
        flag = flags.get(name)
        text = field.description or (flag.help if flag is not None else "") or ""
        spelled = (
            " ".join(f"`{opt}`" for opt in (*flag.opts, *flag.secondary_opts))
            if flag is not None
            else ""
        )
        yield f"| `{name}` | {spelled} | {_default(field)} | {_values(field)} | {_cell(text)} |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return _spelled(field.default)


def _spelled(value: object) -> str:
    match value:
        case None | "" | ():
            return ""
        case tuple():
            return ", ".join(map(_spelled, value))
        case enum.Enum():
            return f"`{value.value}`"
        case bool():
            return "yes" if value else "no"
        case Path():
            return f"`{value}`"
        case float():
            return f"`{value:g}`"
        case _:
            return f"`{value}`"


def _values(field: FieldInfo) -> str:
    """Return the choices or limits of a field."""
    kinds = [field.annotation, *get_args(field.annotation)]
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return ", ".join(f"`{item.value}`" for item in kind)
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    if choices:
        return ", ".join(f"`{value}`" for value in choices)
    return ", ".join(
        _limit(limit) for limit in field.metadata if isinstance(limit, Ge | Gt | Le | Lt | MinLen)
    )


def _limit(limit: Ge | Gt | Le | Lt | MinLen) -> str:
    match limit:
        case Ge(ge=number):
            return f"at least {number}"
        case Gt(gt=number):
            return f"above {number}"
        case Le(le=number):
            return f"at most {number}"
        case Lt(lt=number):
            return f"below {number}"
        case MinLen(min_length=number):
            return f"at least {number}"


def _commands() -> Iterator[str]:
    group = typer.main.get_command(baton_app)
    assert isinstance(group, TyperGroup)
    for name, command in group.commands.items():
        if name in _PROGRAMS:
            yield from _command(name, typer.main.get_command(_PROGRAMS[name]))
        elif not command.context_settings.get("ignore_unknown_options"):
            yield from _command(name, command)


def _command(name: str, command: object) -> Iterator[str]:
    assert isinstance(command, TyperCommand)
    arguments = [
        each.name.upper()
        for each in command.params
        if isinstance(each, TyperArgument) and each.required and each.name
    ]
    yield f"### `{' '.join(['baton', name, *arguments])}`\n\n{_cell(command.help or '')}\n\n"
    options = list(_flags(command).values())
    if options:
        yield "| Flag | Default | Meaning |\n|---|---|---|\n"
    for option in options:
        spelled = " ".join(f"`{opt}`" for opt in (*option.opts, *option.secondary_opts))
        # A default that is made in the command is shown by name only.
        value = option.show_default if isinstance(option.show_default, str) else option.default
        default = "" if value is False else _spelled(value)
        variable = f" (`{option.envvar}`)" if option.envvar else ""
        yield f"| {spelled} | {default} | {_cell(option.help or '')}{variable} |\n"
    yield "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
