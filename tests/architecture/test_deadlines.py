"""One name for the end of a wait (`deadline`, a `Deadline`) and one for its length (`timeout_s`)."""

import ast
from collections.abc import Iterator
from itertools import chain

import pytest

from tests.architecture.source import PRODUCT, modules

# Words that once named the end, the length or the rest of a wait, in loop time or in clock time.
FORMER = {
    "due_at",
    "ends_at",
    "ends_at_s",
    "ends_in_s",
    "give_up_at",
    "give_up_at_s",
    "patience_s",
    "time_limit_s",
}
# Bench and tools are not the product; their words for a client's behaviour are their own.
CHECKED = tuple(package for package in PRODUCT if package not in ("bench", "tools", "protos"))


def bound(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None, ast.expr | None, int]]:
    """Yield names, attributes, fields and parameters with their annotation and value."""
    for node in ast.walk(tree):
        match node:
            case ast.arg():
                yield node.arg, node.annotation, None, node.lineno
            case ast.AnnAssign():
                for name in _named(node.target):
                    yield name, node.annotation, node.value, node.lineno
            case ast.Assign():
                for name in chain.from_iterable(map(_named, node.targets)):
                    yield name, None, node.value, node.lineno


def _named(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Tuple(elts=elements):
            for element in elements:
                yield from _named(element)


def faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for name, annotation, value, line in bound(tree):
        plain = name.lstrip("_")
        if plain in FORMER:
            yield line, f"{name}: say deadline or timeout_s"
        if plain == "deadline" and annotation is not None:
            if "Deadline" not in ast.unparse(annotation):
                yield line, f"{name} is no Deadline"
        elif plain == "deadline" and isinstance(value, ast.BinOp):
            yield line, f"{name} is a number"
        if plain == "timeout_s" and value is not None and "now()" in ast.unparse(value):
            yield line, f"{name} is a point in time"


def test_ends_of_waits_are_deadlines() -> None:
    found = [
        f"{name}:{line} {fault}"
        for name, tree in modules(*CHECKED).items()
        for line, fault in faults(tree)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "deadline = clock.now() + 5",
        "self._deadline = loop.time() + 5",
        "def wait(deadline: float) -> None: ...",
        "class A:\n    deadline: float = 0.0",
        "self._ends_at = 5",
        "def wait(*, patience_s: float) -> None: ...",
        "due_at, other = 1, 2",
        "timeout_s = clock.now() + 5",
    ],
)
def test_number_or_former_word_is_found(text: str) -> None:
    assert list(faults(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "deadline = Deadline.after(clock, 5)",
        "deadline: Deadline | None = None",
        "deadline_s = time.monotonic() + timeout_s",
        "def wait(deadline: Deadline, *, timeout_s: float) -> None: ...",
    ],
)
def test_deadline_is_not_found(text: str) -> None:
    assert not list(faults(ast.parse(text)))
