"""Options that the commands of `baton` share, and one-line errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Self

import typer

from baton.client import DEFAULT_TARGET
from baton.connection import ConnectionFlags
from baton.finite import finite
from runtime.config import MAX_WAIT_S, Config
from runtime.config_flags import Flags
from runtime.errors import BatonError, ConfigError
from runtime.observe.log import report_end
from runtime.process.standard_streams import reporting_full_disk

TargetOption = Annotated[
    list[str] | None,
    typer.Option(
        show_default=DEFAULT_TARGET,
        envvar="BATON_TARGET",
        help="HOST:PORT of the router. Several (repeated, or separated by commas) are used in "
        "turn; one continues what another did not finish.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        min=0.001, max=MAX_WAIT_S, callback=finite, help="Give up after this many seconds."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


class CommandOptions(Config):
    """Options of a command, which typer has checked."""

    @classmethod
    def of(cls, given: Flags) -> Self:
        """Return the options of a command line, without another check.

        The prompt may be an argument that the locale cannot decode, which pydantic would reject.
        """
        return cls.model_construct(None, **given)


def targets_of(given: list[str] | None) -> tuple[str, ...]:
    """Return the routers that `--target` names, or raise ConfigError if it names none."""
    targets = tuple(
        part.strip()
        for text in given or [DEFAULT_TARGET]
        for part in text.split(",")
        if part.strip()
    )
    if not targets:
        raise ConfigError("--target must name a router, HOST:PORT", field="target")
    return targets


@contextmanager
def one_line_errors(
    target: list[str] | None = None, connection: ConnectionFlags | None = None
) -> Iterator[None]:
    """Exit with one line about a failure.

    `target` and the flags are those of a command that connects.
    """
    try:
        with reporting_full_disk():
            yield
    except BatonError as error:
        advice = connection.advice(error, target or [DEFAULT_TARGET]) if connection else ""
        report_end(f"baton: {error}{advice}")
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
