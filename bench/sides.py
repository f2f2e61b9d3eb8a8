"""Sides of a comparison: processes that compute on request, one line per question and answer."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from bench.report import Value, render


class LineProcess:
    """Process that reads questions from stdin and writes answers to stdout, one line each.

    Use it as a context manager: leaving it ends the process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def exchange(self, question: str) -> str:
        """Send one line; return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return self.next_line()

    def next_line(self) -> str:
        """Return the next line, or raise RuntimeError if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.name} side ended with status {self._process.wait()}")
        return line


class CheckoutSide(LineProcess):
    """Script of this folder that times the code of one checkout, case by case."""

    def __init__(self, script: str, checkout: Path) -> None:
        super().__init__(
            checkout.name,
            [sys.executable, "-P", str(Path(__file__).with_name(script))],
            {**os.environ, "PYTHONPATH": str(checkout)},
        )

    def time(self, *case: str | int) -> float:
        """Return the seconds per layer."""
        return float(self.exchange(" ".join(map(str, case))))


def checkout_sides(script: str, against: Path | None, stack: ExitStack) -> dict[str, CheckoutSide]:
    """Start "ours", and "against" if another checkout is given; they end with the stack."""
    checkouts = {"ours": Path(__file__).parents[1]} | (
        {} if against is None else {"against": against}
    )
    return {
        name: stack.enter_context(CheckoutSide(script, checkout))
        for name, checkout in checkouts.items()
    }


def compare_checkouts(
    name: str, text: str | None, measure: Callable[[Path | None], dict[str, Value]]
) -> None:
    """Run the command line of a comparison with another checkout, and print its report."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="other checkout to time in turn with this one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(render(name, measure(options.against), as_json=options.json))
