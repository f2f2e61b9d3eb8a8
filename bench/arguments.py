"""Types of command line arguments: argparse reports their errors in one line, before any work."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from baton.traces import read_trace
from baton.workload import Planned
from runtime.errors import ConfigError


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of whole numbers that are at least `least`."""

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


def above_zero(text: str) -> float:
    """Return a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return number


def trace_file(text: str) -> list[Planned]:
    """Return the requests of the trace at this path."""
    try:
        return list(read_trace(Path(text)).planned)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
