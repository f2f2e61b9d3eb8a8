"""Allowed imports between packages. Type-only and function-level imports count as well, since they
also form cycles."""

import ast
import subprocess
import sys

import pytest

from tests.architecture.source import (
    PACKAGES,
    PRODUCT,
    ROOT,
    find_cycle,
    import_graph,
    imports_of,
    is_generated,
    modules,
    names,
    package_graph,
    reachable,
)

# Package -> its allowed imports besides itself: a package, or one module of it.
ALLOWED = {
    "runtime": (),
    "protos": (),
    "engine": ("runtime",),
    "models": ("engine", "runtime"),
    "transfer": ("engine.core.layer_range", "engine.memory.layout", "protos", "runtime"),
    "pool": ("engine", "models", "transfer", "protos", "runtime"),
    "prefill": ("pool", "engine", "models", "transfer", "protos", "runtime"),
    "decode": ("pool", "engine", "models", "transfer", "protos", "runtime"),
    "worker": ("prefill", "decode", "pool", "engine", "models", "transfer", "protos", "runtime"),
    "router": ("protos", "runtime"),
    "baton": ("protos", "runtime"),
    "planner": ("baton", "runtime"),
    "demo": ("engine", "models", "runtime"),
    "bench": ("baton", "decode.event_sender", "demo", "engine", "models", "planner", "pool", "protos", "router",
              "runtime", "sim", "testing", "transfer", "tests.support"),
    "sim": ("baton", "engine", "planner", "pool", "prefill", "protos", "router", "runtime", "worker.chunk_budget"),
    "testing": ("engine", "transfer", "protos", "runtime"),
    "tools": ("baton", "planner", "pool", "protos", "router", "runtime", "sim", "testing", "tests", "worker.config"),
}  # fmt: skip
# The folders of `engine/` from the lowest to the highest: each imports only earlier ones.
ENGINE_ROOMS = (
    "core",
    "kernels",
    "kernels.host",
    "kernels.host.codegen",
    "kernels.host.tokens",
    "kernels.host.linear",
    "kernels.host.recurrent",
    "kernels.host.attention",
    "kernels.host.aot",
    "kernels.device",
    "memory",
    "contracts",
    "backends",
    "backends.cpu",
    "backends.cuda",
    "sampling",
    "graphs",
    "speculative",
    "speculative.contracts",
    "speculative.attention",
    "speculative.trees",
    "speculative.replay",
    "speculative.drafters",
    "pipeline",
    "assembly",
)
# The modules of speculation that know whether they run on the host or on a GPU.
DEVICE_SPECULATION = {
    "engine.speculative.attention.multistep_device",
    "engine.speculative.attention.multistep_paged",
}
TORCH_FREE = ("baton", "planner", "protos", "router", "runtime", "transfer")


def breaches(package: str) -> list[str]:
    """Return imports that `package` must not make, as "module imports module"."""
    allowed, found = (package, *ALLOWED[package]), []
    for name, tree in modules(package).items():
        for target in imports_of(tree, names(*PACKAGES)):
            ours = target.split(".")[0] in PACKAGES
            if ours and not any(
                target == part or target.startswith(f"{part}.") for part in allowed
            ):
                found.append(f"{name} imports {target}")
    return found


def test_every_package_has_a_rule() -> None:
    assert set(ALLOWED) == set(PRODUCT)
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(PACKAGES)


@pytest.mark.parametrize("package", PRODUCT)
def test_imports_go_one_way(package: str) -> None:
    assert breaches(package) == []


def test_no_module_imports_itself_through_others() -> None:
    assert find_cycle(import_graph(*PACKAGES)) == []


def test_no_package_imports_itself_through_others() -> None:
    """Checks folders at every level. A cycle between folders makes one unplanned folder of them."""
    assert find_cycle(package_graph(import_graph(*PACKAGES))) == []


def test_packages_of_the_engine_import_in_one_direction() -> None:
    packages = {
        name: targets
        for name, targets in package_graph(import_graph("engine")).items()
        if name != "engine"
    }
    rooms = [f"engine.{room}" for room in ENGINE_ROOMS]
    assert sorted(rooms) == sorted(packages)
    for place, room in enumerate(rooms):
        assert packages[room] <= set(rooms[:place]), room


def test_speculation_imports_no_device_but_in_the_modules_for_one() -> None:
    """`engine/assembly` chooses the attention of a draft, and passes it by protocol."""
    graph = import_graph("engine")
    devices = {
        name for name in graph if name.startswith(("engine.backends.cpu.", "engine.backends.cuda."))
    }
    speculation = {name for name in graph if name.startswith("engine.speculative.")}
    assert devices
    assert {
        name for name in speculation if devices & reachable(graph, {name})
    } == DEVICE_SPECULATION  # fmt: skip


def test_imports_are_absolute() -> None:
    relative = [
        name
        for name, tree in modules(*PACKAGES).items()
        for target in imports_of(tree, ())
        if target.startswith(".")
    ]
    assert relative == []


def test_imports_are_spelled_out() -> None:
    """An import by string escapes every rule of this file."""
    dynamic = [
        name for name, tree in modules(*PRODUCT).items() for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and (node.id if isinstance(node, ast.Name) else node.attr) in ("import_module", "__import__")
    ]  # fmt: skip
    assert dynamic == []


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_path_leads_to_torch(package: str) -> None:
    graph, trees = import_graph(*PRODUCT), modules(*PRODUCT)
    found = [
        name for name in sorted(reachable(graph, names(package))) if not is_generated(name)
        for target in imports_of(trees[name], ()) if target.split(".")[0] == "torch"
    ]  # fmt: skip
    assert found == []


def test_router_client_and_runtime_start_without_torch() -> None:
    wanted = sorted(
        name for name in names("baton", "router", "runtime") if not name.endswith("__main__")
    )
    program = f"""
import importlib, sys
sys.modules["torch"] = None  # importing it raises ImportError
for name in {wanted!r}:
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


def test_the_reader_sees_nested_imports() -> None:
    source = """
import a.b
from c import d, e
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from f.g import h
def late():
    import i
    from . import j
try:
    from k import m as n
except ImportError:
    pass
"""
    found = list(imports_of(ast.parse(source), known={"c.d", "f.g.h"}))
    assert sorted(found) == sorted(["a.b", "c.d", "c", "typing", "f.g.h", "i", ".", "k"])


def test_the_cycle_finder_finds_cycles() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert find_cycle({"a": {"a"}}) == ["a", "a"]
    assert find_cycle({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []


def test_one_module_names_ucx() -> None:
    """`make_transport` chooses the transport; all others take what the protocols promise."""
    product = modules(*PRODUCT)
    naming = {
        name
        for name, tree in product.items()
        if not name.startswith(("transfer.ucx", "bench.", "tools."))
        and any(imported.startswith("transfer.ucx") for imported in imports_of(tree, product))
    }
    assert naming == {"pool.stage.transports"}
