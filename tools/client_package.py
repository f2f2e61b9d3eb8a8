"""Builder of the distribution `baton-client`: `python -m tools.client_package FOLDER`.

The folder is ready for `pip install FOLDER` or a build. It holds the modules that the Python client
needs, as the one package `baton_client`. Modules keep their names below it, and their imports are
rewritten. The distribution needs grpc and pydantic, but no torch. It does not conflict with other
packages named `protos`, `engine` or `runtime`.
"""

import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "baton_client"
FIRST = "baton.client"
_IMPORT = re.compile(r"^(\s*(?:from|import)\s+)(baton|runtime|protos)\b(?!_)", re.MULTILINE)
_IMPORTED = re.compile(
    r"^\s*(?:from\s+((?:baton|runtime|protos)[\w.]*)\s+import\s+(\([^)]*\)|[^\n#]+)"
    r"|import\s+((?:baton|runtime|protos)[\w.]*))",
    re.MULTILINE,
)
_NEEDS = ("googleapis-common-protos", "grpcio", "grpcio-health-checking", "protobuf", "pydantic")
_INIT = '''"""A client of Baton: `BatonClient`, and `AsyncBatonClient` for asyncio."""

from baton_client.client import DEFAULT_TARGET, AsyncBatonClient, BatonClient
from baton_client.runtime import errors
from baton_client.runtime.security.access import client_security
from baton_client.values import (
    ChatMessage,
    Chunk,
    Completion,
    Event,
    Finish,
    FinishReason,
    Query,
    Sampling,
    Stop,
    StructuredOutput,
    Usage,
)

__all__ = ["DEFAULT_TARGET", "AsyncBatonClient", "BatonClient", "ChatMessage", "Chunk", "Completion", "Event", "Finish",
           "FinishReason", "Query", "Sampling", "Stop", "StructuredOutput", "Usage", "client_security", "errors"]
'''
_README = """# baton-client

A Python client of Baton, which serves large language models with prefill and decode on separate workers.

```python
from baton_client import BatonClient, Query

with BatonClient("127.0.0.1:7000") as client:
    print(client.complete(Query("Once upon a time")).text)
```
"""


def needed_modules(first: str = FIRST) -> list[str]:
    """Return the repository's modules that `first` imports at any level, including itself."""
    found: set[str] = set()
    waiting = [first]
    while waiting:
        name = waiting.pop()
        if name not in found and (path := _file_of(name)) is not None:
            found.add(name)
            waiting += _imports(path.read_text())
    return sorted(found)


def _imports(source: str) -> list[str]:
    """Return names that may be modules: each imported module, and each name imported from it."""
    names = []
    for origin, things, plain in _IMPORTED.findall(source):
        names.append(origin or plain)
        names += [
            f"{origin}.{thing.split(' as ')[0].strip()}"
            for thing in things.strip("()").split(",")
            if origin
        ]
    return names


def _file_of(module: str) -> Path | None:
    path = ROOT / f"{module.replace('.', '/')}.py"
    return path if path.is_file() else None


def _place(module: str) -> Path:
    """Return the path of a module in the package, without its suffix."""
    top, _, rest = module.partition(".")
    return Path(rest) if top == "baton" else Path(top, *rest.split("."))


def _rewritten(source: str) -> str:
    source = _IMPORT.sub(
        lambda found: f"{found[1]}{PACKAGE}" + ("" if found[2] == "baton" else f".{found[2]}"),
        source,
    )
    return source.replace("'protos.", f"'{PACKAGE}.protos.")


def write_client(folder: Path) -> list[str]:
    """Write the distribution into `folder`, which is emptied first, and return its modules.

    Raises OSError.
    """
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / PACKAGE
    modules = needed_modules()
    for module in modules:
        source = ROOT / module.replace(".", "/")
        for ending in (".py", ".pyi"):
            if (file := source.with_suffix(ending)).is_file():
                target = (package / _place(module)).with_suffix(ending)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_rewritten(file.read_text()))
    for inner in {path.parent for path in package.rglob("*.py")} - {package}:
        (inner / "__init__.py").write_text("")
    (package / "__init__.py").write_text(_INIT)
    (package / "py.typed").write_text("")
    (folder / "README.md").write_text(_README)
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    (folder / "pyproject.toml").write_text(
        _project(sorted({path.parent for path in package.rglob("*.py")}), folder)
    )
    return modules


def _project(folders: list[Path], root: Path) -> str:
    """Return the distribution's pyproject.toml, with the server's version and version ranges."""
    server = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [need for need in server["dependencies"] if re.split(r"[<>=~!]", need)[0] in _NEEDS]
    packages = [".".join(path.relative_to(root).parts) for path in folders]
    listed = "".join(f'    "{need}",\n' for need in needs)
    return f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "baton-client"
version = "{server["version"]}"
description = "A Python client of Baton."
readme = "README.md"
license = "{server["license"]}"
license-files = ["LICENSE"]
requires-python = "{server["requires-python"]}"
dependencies = [
{listed}]

[tool.setuptools]
packages = {packages!r}

[tool.setuptools.package-data]
"*" = ["py.typed", "*.pyi"]
"""


if __name__ == "__main__":
    print("\n".join(write_client(Path(sys.argv[1]))))
