"""Habits that a linter does not know: no process globals, no probing, and test files that test."""

import ast
import re
import tomllib
from collections.abc import Iterator

import yaml

from tests.architecture.source import PRODUCT, ROOT, modules, names

NOT_SHIPPED = ("bench", "testing", "tests", "tools")


def calls(tree: ast.AST, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == function
        ):
            yield node


def where(name: str, node: ast.stmt | ast.expr) -> str:
    return f"{name}:{node.lineno}"


def test_no_global_statement() -> None:
    found = [
        where(name, node) for name, tree in modules(*PRODUCT).items() for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]  # fmt: skip
    assert found == []


def test_no_probing_for_attributes() -> None:
    """`hasattr`, and `getattr` with a default, ask an object what it is; a Protocol says it."""
    found = [
        where(name, call)
        for name, tree in modules(*PRODUCT).items()
        for call in calls(tree, "hasattr")
    ]
    found += [
        where(name, call) for name, tree in modules(*PRODUCT).items() for call in calls(tree, "getattr")
        if len(call.args) > 2
    ]  # fmt: skip
    assert found == []


PICKLES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "copyreg",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing",
}
# attributes of torch, numpy, pandas and torch.distributed that read or send pickles, or might
UNPICKLERS = {
    "load": {"torch", "np", "numpy"},
    "save": {"torch"},
    "read_pickle": {"pd", "pandas"},
    "send_object_list": {"*"},
    "recv_object_list": {"*"},
    "broadcast_object_list": {"*"},
    "scatter_object_list": {"*"},
    "all_gather_object": {"*"},
    "gather_object": {"*"},
    "ProcessPoolExecutor": {"*"},
}


def pickling(tree: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """Yield code that reads, writes or sends pickles: unpickling runs code of the sender."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Import)
            and {alias.name.split(".")[0] for alias in node.names} & PICKLES
        ):
            yield node
        elif isinstance(node, ast.ImportFrom):
            owner, taken = (node.module or "").split(".")[0], {alias.name for alias in node.names}
            if owner in PICKLES or any(
                owner in UNPICKLERS[name] or "*" in UNPICKLERS[name]
                for name in taken & set(UNPICKLERS)
            ):
                yield node
        elif isinstance(node, ast.Attribute) and node.attr in UNPICKLERS:
            owners = UNPICKLERS[node.attr]
            if "*" in owners or (isinstance(node.value, ast.Name) and node.value.id in owners):
                yield node
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("eval", "exec")
        ):
            yield node


def test_nothing_is_pickled() -> None:
    found = [
        where(name, node) for name, tree in modules(*PRODUCT).items() if name.split(".")[0] not in NOT_SHIPPED
        for node in pickling(tree)
    ]  # fmt: skip
    assert found == []


def test_the_reader_of_pickles_sees_them() -> None:
    source = """
import os, pickle
from multiprocessing.connection import Client
from torch import load
import torch.distributed as dist
torch.load("x")
torch.save({}, "x")
np.load("x", allow_pickle=True)
dist.broadcast_object_list([], 0)
eval("1")
from concurrent.futures import ProcessPoolExecutor
json.load(file)
model.eval()
config.load()
"""
    assert sorted(node.lineno for node in pickling(ast.parse(source))) == [
        2,
        3,
        4,
        6,
        7,
        8,
        9,
        10,
        11,
    ]


def environment_proxies(name: str, tree: ast.AST) -> Iterator[ast.expr]:
    """Yield code that would use a proxy of the environment to reach a process of Baton.

    That is an HTTP client that reads the environment, or a gRPC channel without the option that
    disables it; `runtime.rpc.client` sets that option.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called, options = (
            node.func.attr,
            {f"{word.arg}={ast.unparse(word.value)}" for word in node.keywords},
        )
        is_channel = (
            called in ("insecure_channel", "secure_channel") and name != "runtime.rpc.client"
        )
        if (
            called in ("AsyncClient", "Client", "urlopen") and "trust_env=False" not in options
        ) or (is_channel and "options=PAST_PROXIES" not in options):
            yield node


def test_processes_connect_without_a_proxy() -> None:
    found = [
        where(name, node) for name, tree in modules(*PRODUCT).items() for node in environment_proxies(name, tree)
    ]  # fmt: skip
    assert found == []


def test_the_reader_of_proxies_sees_them() -> None:
    source = """
httpx2.AsyncClient(timeout=1)
httpx2.Client(trust_env=True)
urllib.request.urlopen(url)
grpc.aio.insecure_channel(target)
httpx2.AsyncClient(trust_env=False)
grpc.aio.insecure_channel(target, options=PAST_PROXIES)
"""
    assert [node.lineno for node in environment_proxies("bench.x", ast.parse(source))] == [
        2,
        3,
        4,
        5,
    ]


def is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
        "test_"
    )


def is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or (
        isinstance(node, ast.Attribute) and node.attr in ("raises", "warns")
    )


def is_suite(node: ast.AST) -> bool:
    """Return whether a class runs a shared suite against one more implementation."""
    return isinstance(node, ast.ClassDef) and node.name.startswith("Test") and bool(node.bases)


def test_every_test_file_tests() -> None:
    """Each collects at least one test and checks at least one thing."""
    idle = []
    for name, tree in modules("tests").items():
        nodes = list(ast.walk(tree))
        tests = any(map(is_test, nodes)) and any(map(is_check, nodes))
        if (
            name.rpartition(".")[2].startswith("test_")
            and not tests
            and not any(map(is_suite, nodes))
        ):
            idle.append(name)
    assert idle == []


def test_every_test_module_is_one_that_pytest_finds() -> None:
    """A test in a file that is not named test_*.py never runs."""
    lost = [
        where(name, node) for name, tree in modules("tests").items() for node in tree.body
        if is_test(node) and not name.rpartition(".")[2].startswith("test_")
    ]  # fmt: skip
    assert lost == []


def test_no_test_is_skipped() -> None:
    """But for those that need a GPU, a network of their own, a package index, a program that is
    not packaged for every machine, the repository's history, or time that the machine does not
    have, which say so."""
    markers = {"skip", "skipif", "xfail", "importorskip"}
    refusable = (
        "tests.conftest",
        "tests.gpu.conftest",
        "tests.bench.test_storm",
        "tests.cluster.test_moving",
        "tests.cluster.test_upgrade",
        "tests.deploy.test_chart",
        "tests.guides.test_lm_eval",
        "tests.guides.test_typescript",
        "tests.support.texts.published",
    )
    found = [
        where(name, node) for name, tree in modules("tests").items() for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in markers and name not in refusable
    ]  # fmt: skip
    assert found == []


def test_every_package_is_shipped() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for package in PRODUCT if package not in NOT_SHIPPED
        for path in (ROOT / package).rglob("__init__.py")
    }  # fmt: skip
    assert set(listed) == folders
    assert len(listed) == len(set(listed))


def test_every_folder_with_code_is_a_package() -> None:
    """A folder without __init__.py imports from here but is missing where the package is
    installed."""
    found = names(*PRODUCT)
    assert (
        sorted(name for name in found if "." in name and name.rpartition(".")[0] not in found) == []
    )


def test_pre_commit_runs_the_checks_of_make_check() -> None:
    """Every part of the target is a hook, with the same tools. Hooks of messages are additional."""
    parts = re.search(r"^check: (.*?) *##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert parts is not None
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {
        hook["id"]: hook["entry"]
        for hook in repository["hooks"]
        if "commit-msg" not in hook.get("stages", ())
    }
    assert hooks == {part: f"make {part}" for part in parts[1].split()}
