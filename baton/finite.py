"""Check of numeric options."""

import math

import typer


def finite(value: float | None) -> float | None:
    """Return the value, or raise typer.BadParameter for NaN (for `typer.Option(callback=finite)`).

    The limits of an option accept NaN, which is neither less nor more than any limit.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, got {value}.")
    return value
