"""Names of modules in text, which no import check or type checker reads, must exist after a
move."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.source import PACKAGES, PRODUCT, imports_of, modules, names

# `engine.loop.Scheduler` in prose. Packages of protobuf, which are versioned (`baton.v1`), are not
# meant.
_IN_PROSE = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`")


def _texts(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node


def programs(tree: ast.AST) -> Iterator[ast.Module]:
    """Yield strings that are whole programs for child processes."""
    for node in _texts(tree):
        try:
            program = ast.parse(str(node.value))
        except (SyntaxError, ValueError):
            continue
        if any(isinstance(line, ast.Import | ast.ImportFrom) for line in program.body):
            yield program


def lost_imports(tree: ast.AST, known: frozenset[str]) -> list[str]:
    """Return modules that programs in strings import and that do not exist."""
    return [
        target
        for program in programs(tree)
        for target in imports_of(program, known)
        if target.split(".")[0] in PACKAGES and target not in known
    ]


def lost_mentions(tree: ast.AST, known: frozenset[str]) -> list[str]:
    """Return dotted names in docstrings that are neither a module nor a name in one."""
    mentioned = [name for node in _texts(tree) for name in _IN_PROSE.findall(str(node.value))]
    return [
        name
        for name in mentioned
        if not name.startswith("baton.v1.") and not _leads_somewhere(name, known)
    ]


def _leads_somewhere(name: str, known: frozenset[str]) -> bool:
    """Return whether `a.b.C.d` exists: `a.b` is a module that binds `C` at its top level."""
    module, rest = name, list[str]()
    while module not in known:
        module, _, last = module.rpartition(".")
        rest.insert(0, last)
    return not rest or rest[0] in _bound(modules(module.split(".")[0])[module])


def _bound(tree: ast.Module) -> set[str]:
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_programs_in_strings_import_existing_names(package: str) -> None:
    found = {name: lost_imports(tree, names(*PACKAGES)) for name, tree in modules(package).items()}
    assert {name: lost for name, lost in found.items() if lost} == {}


@pytest.mark.parametrize("package", PRODUCT)
def test_prose_names_existing_modules(package: str) -> None:
    found = {name: lost_mentions(tree, names(*PACKAGES)) for name, tree in modules(package).items()}
    assert {name: lost for name, lost in found.items() if lost} == {}


def test_the_reader_sees_lost_names() -> None:
    tree = ast.parse('''
"""See `engine.nowhere.Thing`, `engine.loop.Scheduler` and `baton.v1.Generation`."""
program = """
from engine.nowhere import Thing
import engine.loop, torch
"""
words = "import whatever you like"
''')
    assert lost_imports(tree, names(*PACKAGES)) == ["engine.nowhere"]
    assert lost_mentions(tree, names(*PACKAGES)) == ["engine.nowhere.Thing"]
