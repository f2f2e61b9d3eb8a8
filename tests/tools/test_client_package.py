"""The distribution `baton-client`, used by a program with packages of the same names as Baton's."""

import ast
import asyncio
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.router.generation import EchoGeneration, serve_echo
from tools.client_package import PACKAGE, needed_modules, write_client

# Import names of grpc, its companions, and pydantic.
NEEDED = {"google", "grpc", "grpc_health", "pydantic"}
PROGRAM = """
import sys
for name in ("baton", "router", "pool", "torch", "typer", "numpy", "prometheus_client"):
    sys.modules[name] = None  # importing it raises ImportError
import protos, engine, runtime
from baton_client import BatonClient, Query, client_security, errors
import baton_client.client
assert (protos.WHOSE, engine.WHOSE, runtime.WHOSE) == ("mine", "mine", "mine")
with BatonClient(sys.argv[1]) as client:
    print(client.complete(Query("hello there"), timeout_s=60).text)
    try:
        client.complete(Query("hello"), timeout_s=float("nan"))
    except errors.BatonError as error:
        print(type(error).__module__)
"""


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distribution") / "baton-client"
    write_client(folder)
    return folder


def test_it_imports_itself_grpc_and_pydantic_alone(distribution: Path) -> None:
    tops = set()
    for path in distribution.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                tops |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                tops.add((node.module or "").split(".")[0])
    assert tops - set(sys.stdlib_module_names) == NEEDED | {PACKAGE}
    project = tomllib.loads((distribution / "pyproject.toml").read_text())
    names = {need.partition(">")[0] for need in project["project"]["dependencies"]}
    assert names == {
        "googleapis-common-protos",
        "grpcio",
        "grpcio-health-checking",
        "protobuf",
        "pydantic",
    }
    assert all(name.split(".")[0] == PACKAGE for name in project["tool"]["setuptools"]["packages"])
    assert [path.name for path in distribution.iterdir() if path.is_dir()] == [PACKAGE]


def test_it_has_the_whole_client_and_nothing_of_the_server() -> None:
    modules = needed_modules()
    assert {"baton.client", "baton.wire", "protos.generation_pb2", "runtime.errors"} <= set(modules)
    assert not {
        "runtime.rpc.server",
        "runtime.observe.metrics",
        "baton.cluster",
        "protos.decode_pb2",
    } & set(modules)


async def test_it_works_with_packages_of_the_same_names(distribution: Path, tmp_path: Path) -> None:
    for name in ("protos", "engine", "runtime"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("WHOSE = 'mine'")
    server, address = await serve_echo(EchoGeneration())
    try:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "error",
            "-P",
            "-c",
            PROGRAM,
            address,
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PYTHONPATH": f"{tmp_path}:{distribution}"},
        )
        async with asyncio.timeout(120):
            output, _ = await child.communicate()
    finally:
        await server.stop()
    assert output.decode().splitlines() == ["hello there ", "baton_client.runtime.errors"], (
        output.decode()
    )
