"""Generator of the Python stubs of protos/: `python -m tools.stubs FOLDER`.

The stubs become the package `protos` in FOLDER. The .proto files are in folders of their packages,
as generators of all languages require. protoc's Python stubs import each other by these folders,
which are not Python packages of Baton, so the imports are rewritten: `baton.v1.types_pb2` becomes
`protos.types_pb2`.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).parent.parent / "protos"
_PACKAGE = r"(?:baton\.v1|xds\.data\.orca\.v3|xds\.service\.orca\.v3)"
_REWRITES = (
    (rf"^from {_PACKAGE} import", "from protos import"),  # imports between stubs
    (rf"'{_PACKAGE}\.(\w+_pb2)'", r"'protos.\1'"),  # modules of classes
    (
        r"(?:baton/v1|xds/(?:data|service)/orca/v3)/(\w+_pb2_grpc\.py)",
        r"protos/\1",
    ),  # texts of errors
)


def write_stubs(folder: Path) -> list[Path]:
    """Write the stubs and return their paths.

    Raises CalledProcessError, with protoc's message on stderr.
    """
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    (folder / "protos").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as draft:
        outputs = [
            f"--{name}_out={draft}" for name in ("python", "pyi", "grpc_python", "mypy_grpc")
        ]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                f"-I{PROTOS}",
                *outputs,
                f"--plugin=protoc-gen-mypy_grpc={plugin}",
                *files,
            ],
            check=True,
        )
        return [
            _rewritten(path, folder / "protos" / path.name)
            for path in sorted(Path(draft).rglob("*_pb2*"))
        ]


def _rewritten(draft: Path, path: Path) -> Path:
    text = draft.read_text()
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    path.write_text(text)
    return path


if __name__ == "__main__":
    write_stubs(Path(sys.argv[1]))
