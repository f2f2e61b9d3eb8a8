"""Command lines that are generated from settings.

Every setting of a `Config` gets a flag of its name. The field gives the type, the default and the
help text, so that a setting is declared once:

    app = typer.Typer(add_completion=False)
    app.command(help="Run a router.")(flags_of(RouterConfig, section="router")(run))

    def run(flags: Flags, file: Path | None, checks_only: bool) -> None: ...
"""

import inspect
import types
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from runtime.config import Config

Flags = Mapping[str, object]
"""Values by setting, None for flags that were not given."""
RunRole = Callable[[Flags, Path | None, bool], None]

_FILE = "config"
_CHECK = "check_settings"


def flags_of(config: type[Config], *, section: str) -> Callable[[RunRole], Callable[..., None]]:
    """Return a decorator that turns `run` into the function of a typer command.

    The command has a flag for each setting of `config`, `--config FILE` and `--check-settings`.
    """
    own = config.__annotations__  # before inherited ones, which are about TLS and probes
    fields = sorted(config.model_fields.items(), key=lambda item: item[0] not in own)
    parameters = [_parameter(name, field) for name, field in fields]
    parameters += [
        _option(_FILE, Path, f"TOML file with a [{section}] table; flags override it."),
        _option(_CHECK, bool, "Check the settings and exit.", "--check-settings"),
    ]

    def decorate(run: RunRole) -> Callable[..., None]:
        def command(**given: Any) -> None:  # noqa: ANN401 - typer converts the values
            file = given.pop(_FILE)
            checks_only = bool(given.pop(_CHECK))
            run({name: _given(value) for name, value in given.items()}, file, checks_only)

        # typer reads a command's parameters from its signature
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    text = field.description or ""
    text = text[:1].upper() + text[1:]
    kind = _kind(field.annotation)
    metavar = "|".join(_choices(field.annotation)) or (
        "<str>" if get_origin(kind) is list else None
    )
    return _option(
        name,
        kind,
        text if text.endswith(".") else f"{text}.",
        metavar=metavar,
        show_default=_shown(field),
    )


def _option(
    name: str,
    kind: object,
    text: str,
    *spellings: str,
    metavar: str | None = None,
    show_default: str | bool = False,
) -> inspect.Parameter:
    option = typer.Option(*spellings, help=text, metavar=metavar, show_default=show_default)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
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
