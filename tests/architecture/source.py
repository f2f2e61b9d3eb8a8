"""Syntax trees of the repository's own modules and their import graph."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PRODUCT = ("baton", "bench", "decode", "demo", "engine", "models", "planner", "pool", "prefill", "protos", "router",
           "runtime", "sim", "testing", "tools", "transfer", "worker")  # fmt: skip
PACKAGES = (*PRODUCT, "tests")


def module_name(path: Path) -> str:
    """Return the dotted name of a path: `engine/memory/leases.py` is `engine.memory.leases`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_generated(name: str) -> bool:
    return name.endswith(("_pb2", "_pb2_grpc"))


@cache
def _paths() -> Mapping[str, Path]:
    """Return every module of the repository, read from disk once so that all rules see the same
    files."""
    return {
        module_name(path): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def path_of(name: str) -> Path:
    """Return the file of a module of the repository."""
    return _paths()[name]


@cache
def _tree(name: str) -> ast.Module:
    path = _paths()[name]
    return ast.parse(path.read_text(), str(path))


def modules(*packages: str) -> Mapping[str, ast.Module]:
    """Parse every hand-written module of these packages, by dotted name."""
    return {name: _tree(name) for name in sorted(names(*packages)) if not is_generated(name)}


def names(*packages: str) -> frozenset[str]:
    """Return the dotted names of all modules of these packages, generated ones included."""
    return frozenset(name for name in _paths() if name.split(".")[0] in packages)


def imports_of(tree: ast.AST, known: Iterable[str]) -> Iterator[str]:
    """Return the imports of a module at any level: at the top, under TYPE_CHECKING, inside
    functions.

    `from a import b` is `a.b` if that is a module of `known`, else `a`. Relative imports keep their
    dots.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in known else base


def import_graph(*packages: str) -> dict[str, set[str]]:
    """Map each module of these packages to the modules of them that it imports.

    Importing `a.b.c` also runs `a` and `a.b`.
    """
    known = names(*packages)
    graph: dict[str, set[str]] = {name: set() for name in known}
    for name, tree in modules(*packages).items():
        for target in imports_of(tree, known):
            graph[name] |= {
                part
                for part in _with_parents(target)
                if part in known and not _is_inside(name, part)
            }
        graph[name] |= {target for target in imports_of(tree, known) if target in known}
    return graph


def package_of(name: str) -> str:
    """Return the folder of a module; a package's own `__init__` is the package."""
    return name if _paths()[name].name == "__init__.py" else name.rpartition(".")[0] or name


def package_graph(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Map each package to the packages that any of its modules imports.

    That importing `a.b` runs `a` does not count: a folder's `__init__` holds no code.
    """
    found: dict[str, set[str]] = {}
    for name, targets in graph.items():
        package = package_of(name)
        found.setdefault(package, set()).update(
            package_of(target)
            for target in targets
            if package_of(target) != package and _paths()[target].name != "__init__.py"
        )
    return found


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return some cycle as a closed path, or nothing.

    The search is depth first; a node met again on the path closes a cycle.
    """
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph.get(node, ())):
            if cycle := search(target, [*path, node]):
                return cycle
        done.add(node)
        return []

    for start in sorted(graph):
        if cycle := search(start, []):
            return cycle
    return []


def reachable(graph: Mapping[str, set[str]], starts: Iterable[str]) -> set[str]:
    """Return every module that importing `starts` imports, themselves included."""
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += graph.get(node, ())
    return found


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
