"""The files that the cache key of a compiled kernel covers."""

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

from engine.kernels import host
from engine.kernels.host.codegen.compiled import source_files

ROOT = "engine.kernels.host"
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(host.__path__, f"{ROOT}.")
    if not found.ispkg and ".aot." not in found.name
)


def imported_by(module: str) -> set[str]:
    """Return the host modules that a module imports anywhere, as Python's parser sees them."""
    found = set()
    for node in ast.walk(ast.parse(Path(str(sys.modules[module].__file__)).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ROOT):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in sys.modules else str(node.module))
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith(ROOT)}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_host_module_that_a_kernel_can_inline_is_covered(module: str) -> None:
    importlib.import_module(module)
    pending = [module]
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += imported_by(name)
    files = {str(sys.modules[name].__file__) for name in reached}
    assert set(source_files(module)) == files


def test_a_kernel_s_own_imports_are_found() -> None:
    importlib.import_module(f"{ROOT}.attention.paged_attention")
    files = {Path(file).name for file in source_files(f"{ROOT}.attention.paged_attention")}
    assert {"paged_attention.py", "small_batch.py", "strided_loops.py", "dot.py"} <= files
