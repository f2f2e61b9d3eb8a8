"""Files have at most 400 lines and functions at most 60.

What is longer has a place in `LONG_FILES` or `LONG_FUNCTIONS` with its present length. It may
shrink but not grow, and it leaves the table when it is short enough.
"""

import ast
from collections.abc import Iterator, Mapping

from tests.architecture.source import PRODUCT, ROOT, modules, path_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

LONG_FILES: Mapping[str, int] = {
    "engine/kernels/host/attention/small_batch.py": 402,
    "engine/kernels/host/codegen/compiled.py": 422,
    "router/request/validate.py": 477,
    "router/workers/worker.py": 471,
}
LONG_FUNCTIONS: Mapping[str, int] = {
    "engine/kernels/device/delta_chunks.py:chunk_prepare_kernel": 73,
    "engine/kernels/device/latent.py:listed_attention_kernel": 64,
    "engine/kernels/device/paged.py:paged_attention_kernel": 64,
    "engine/kernels/device/tree.py:delta_tree_kernel": 66,
    "engine/kernels/host/attention/block_steps.py:add_block": 79,
    "engine/kernels/host/attention/mla.py:_attend": 75,
    "engine/kernels/host/attention/paged_attention.py:attend_in_place": 67,
    "engine/kernels/host/attention/tile_loop.py:take_tiles": 71,
    "engine/kernels/host/codegen/amx.py:TileLoop.write": 66,
    "engine/kernels/host/linear/packed_linear.py:PackedGroup.multiply_runs": 66,
    "engine/kernels/host/linear/packed_linear.py:PackedWeight._launch": 69,
    "engine/kernels/host/linear/packed_linear_kernel.py:_take_items": 96,
    "engine/kernels/host/linear/product_sums.py:_multiply": 63,
    "engine/kernels/host/recurrent/delta_rule.py:_take_steps": 61,
    "runtime/observe/metrics/router.py:RouterMetrics.create": 121,  # a table
}


def file_lengths() -> Iterator[tuple[str, int]]:
    for name in modules(*PRODUCT):
        path = path_of(name)
        yield str(path.relative_to(ROOT)), len(path.read_text().splitlines())


def function_lengths() -> Iterator[tuple[str, int]]:
    for name, tree in modules(*PRODUCT).items():
        path = str(path_of(name).relative_to(ROOT))
        yield from ((f"{path}:{function}", length) for function, length in functions(tree))


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    """Yield the qualified name of each function, and its lines from `def` to its end."""
    for node in ast.iter_child_nodes(tree):
        inside = within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{within}{node.name}."
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{within}{node.name}", node.end_lineno - node.lineno + 1
        yield from functions(node, inside)


def breaches(
    lengths: Mapping[str, int], limit: int, exceptions: Mapping[str, int]
) -> dict[str, str]:
    """Return what is too long, and which exceptions are not needed."""
    found = {
        name: f"{length} lines, at most {exceptions.get(name, limit)}"
        for name, length in lengths.items()
        if length > exceptions.get(name, limit)
    }
    return found | {
        name: f"{lengths.get(name, 0)} lines need no exception"
        for name in exceptions
        if lengths.get(name, 0) <= limit
    }


def test_files_are_short() -> None:
    assert breaches(dict(file_lengths()), MAX_FILE_LINES, LONG_FILES) == {}


def test_functions_are_short() -> None:
    assert breaches(dict(function_lengths()), MAX_FUNCTION_LINES, LONG_FUNCTIONS) == {}


def test_the_reader_measures_nested_functions() -> None:
    tree = ast.parse("""
class Outer:
    @decorated
    def method(self):
        async def inner():
            pass
        return inner

if condition:
    def conditional(): ...
""")
    assert dict(functions(tree)) == {
        "Outer.method": 4,
        "Outer.method.inner": 2,
        "conditional": 1,
    }


def test_an_exception_may_neither_grow_nor_stay_when_it_is_not_needed() -> None:
    exceptions = {"long": 12, "grown": 12, "shrunk": 12, "short": 12, "gone": 12}
    lengths = {"long": 12, "grown": 13, "shrunk": 11, "short": 10, "new": 11}
    assert breaches(lengths, 10, exceptions).keys() == {"grown", "short", "gone", "new"}
