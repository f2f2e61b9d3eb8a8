"""Options that are numbers."""

import math

import typer


def finite(value: float | None) -> float | None:
    """For `typer.Option(callback=finite)`. The limits of an option let what is not a number pass,
    for it is neither less nor more. Raises typer.BadParameter."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, got {value}.")
    return value
