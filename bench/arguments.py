"""Types of command line arguments: argparse refuses with one line what they raise an error for,
before any work."""

import argparse
from collections.abc import Callable
from pathlib import Path

from baton.traces import read_trace
from baton.workload import Planned
from runtime.errors import ConfigError


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not less."""

    def parsed(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} on, got {text!r}"
            )
        return number

    return parsed


def trace_file(text: str) -> list[Planned]:
    """The requests of a trace, by its path."""
    try:
        return list(read_trace(Path(text)).planned)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
