"""The .proto files in the layout that generators of every language expect."""

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from protos import generation_pb2, orca_service_pb2
from tools.stubs import PROTOS, write_stubs


def test_committed_stubs_are_up_to_date(tmp_path: Path) -> None:
    written = write_stubs(tmp_path)
    assert len(written) == 4 * len(list(PROTOS.rglob("*.proto")))
    stale = [path.name for path in written if path.read_text() != (PROTOS / path.name).read_text()]
    assert stale == []
    assert {path.name for path in PROTOS.glob("*_pb2*")} == {path.name for path in written}


def test_files_are_in_the_folder_of_their_package() -> None:
    for pb in (generation_pb2, orca_service_pb2):
        file = pb.DESCRIPTOR
        assert str(Path(file.name).parent) == file.package.replace(".", "/")
        assert (PROTOS / file.name).is_file()
    assert generation_pb2.GenerateRequest.__module__ == "protos.generation_pb2"


def test_a_copy_in_any_folder_is_all_that_a_generator_needs(tmp_path: Path) -> None:
    """protoc finds every import below that folder, and each language's package in the files."""
    copied = tmp_path / "of somebody" / "baton" / "v1"
    copied.mkdir(parents=True)
    for path in (PROTOS / "baton" / "v1").glob("*.proto"):
        (copied / path.name).write_text(path.read_text())
    described = tmp_path / "all.binpb"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{copied.parents[1]}",
            "--include_imports",
            f"--descriptor_set_out={described}",
            "baton/v1/generation.proto",
            "baton/v1/worker.proto",
        ],
        check=True,
        cwd=tmp_path,
        timeout=120,
    )
    files = FileDescriptorSet.FromString(described.read_bytes()).file
    assert {file.name for file in files} >= {"baton/v1/generation.proto", "baton/v1/types.proto"}
    for file in files:
        options = file.options
        assert (options.go_package, options.java_package, options.csharp_namespace) == (
            "baton/v1;batonv1",
            "baton.v1",
            "Baton.V1",
        )
