"""Command lines that are generated from settings.

Every setting of a `Config` gets a flag of its name. The field gives the type, the default and the
help text, so that a setting is declared once:

    app = typer.Typer(add_completion=False)
    app.command(help="Run a router.")(flags_of(RouterConfig, section="router")(run))

    def run(flags: Flags, file: Path | None, checks_only: bool) -> None: ...

A field may carry a `typer.Option` with what a field cannot express, such as another name of the
flag or an environment variable, or a `typer.Argument`:

    config_file: Annotated[Path | None, typer.Option("--config")] = Field(...)
"""

import copy
import inspect
import types
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo
from typer.models import ParameterInfo

from runtime.config import Config

Flags = Mapping[str, object]
"""Values by setting, None for flags that were not given."""
RunRole = Callable[[Flags, Path | None, bool], None]
RunCommand = Callable[[typer.Context, Flags], None]

_FILE = "config"
_CONTEXT = "context"
_CHECK = "check_settings"


def flags_of(config: type[Config], *, section: str) -> Callable[[RunRole], Callable[..., None]]:
    """Return a decorator that turns `run` into the function of a typer command.

    The command has a flag for each setting of `config`, `--config FILE` and `--check-settings`.
    """
    own = config.__annotations__  # before inherited ones, which are about TLS and probes
    fields = sorted(config.model_fields.items(), key=lambda item: item[0] not in own)
    parameters = [_parameter(name, field) for name, field in fields]
    file_help = f"TOML file with a [{section}] table; flags override it."
    parameters += [
        _optional(_FILE, Path, typer.Option(help=file_help)),
        _optional(
            _CHECK, bool, typer.Option("--check-settings", help="Check the settings and exit.")
        ),
    ]

    def decorate(run: RunRole) -> Callable[..., None]:
        def command(**given: Any) -> None:  # noqa: ANN401 - typer converts the values
            file = given.pop(_FILE)
            checks_only = bool(given.pop(_CHECK))
            run({name: _given(value) for name, value in given.items()}, file, checks_only)

        return _with_parameters(command, parameters)

    return decorate


def command_of(config: type[Config]) -> Callable[[RunCommand], Callable[..., None]]:
    """Return a decorator that turns `run(context, flags)` into the function of a typer command.

    The command has a flag for each setting of `config`, and reads no file. So flags that were not
    given have the settings' defaults, and typer checks the limits. Name and help are those of
    `run`.
    """
    fields = config.model_fields.items()
    context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *(_final_parameter(name, field) for name, field in fields)]

    def decorate(run: RunCommand) -> Callable[..., None]:
        def command(**given: Any) -> None:  # noqa: ANN401 - typer converts the values
            run(given.pop(_CONTEXT), given)

        command.__name__ = run.__name__
        command.__doc__ = run.__doc__
        return _with_parameters(command, parameters)

    return decorate


def _with_parameters(
    command: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """Give `command` the signature that typer reads a command's parameters from."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the parameter of a setting that a file may set: None if the flag was not given."""
    option = _option_of(field)
    if option.show_default is True:
        option.show_default = _shown(field)
    return _optional(name, _kind(field.annotation), option)


def _final_parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the parameter of a setting that only its flag sets."""
    option = _option_of(field)
    for limit in field.metadata:
        match limit:
            case Ge(ge=int() | float() as least):
                option.min = least
            case Le(le=int() | float() as most):
                option.max = most
    default = None if field.default_factory is not None else field.get_default()
    return _optional(name, _kind(field.annotation), option, default=default)


def _option_of(field: FieldInfo) -> ParameterInfo:
    """Return the option or argument that the field carries, completed from the field."""
    given = [each for each in field.metadata if isinstance(each, ParameterInfo)]
    option: ParameterInfo = copy.copy(given[0]) if given else typer.Option()
    if not option.help:
        text = field.description or ""
        text = text[:1].upper() + text[1:]
        option.help = text if text.endswith(".") else f"{text}."
    option.metavar = (
        option.metavar
        or "|".join(_choices(field.annotation))
        or ("<str>" if get_origin(_kind(field.annotation)) is list else None)
    )
    return option


def _optional(
    name: str, kind: object, option: ParameterInfo, *, default: object = None
) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[Union[kind, None], option],  # noqa: UP007 - `kind` is a value
    )


def _kind(annotation: object) -> object:
    """Return the type that typer converts the flag's text to."""
    match get_origin(annotation):
        case None:
            return annotation
        case origin if origin is Annotated:
            return _kind(get_args(annotation)[0])
        case origin if origin in (Union, types.UnionType):
            (kind,) = (each for each in get_args(annotation) if each is not types.NoneType)
            return _kind(kind)
        case origin if origin is list:
            return annotation
        case origin if origin is tuple:
            return list[_kind(get_args(annotation)[0])]  # type: ignore[misc]
        case _:
            return str  # a Literal, which the settings check


def _choices(annotation: object) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return ()


def _shown(field: FieldInfo) -> str | bool:
    """Return how help shows the default, False if it has none to show."""
    value = field.default
    if field.is_required() or value is None or value in ("", (), False, True):
        return False
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value.value if isinstance(value, Enum) else value)


def _given(value: object) -> object:
    """Return None for a repeatable flag that was not given, which typer reports as empty."""
    return None if value == [] else value
