"""Processes of a cluster that run the code of another revision.

`python -m tests.support.cluster.other_tree TREE MODULE ...` becomes `python -m MODULE ...` of the
tree TREE.
"""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# They have the versions whose change ends the compatibility of processes.
VERSION_FILES = ("runtime/version.py", "transfer/plan/compatibility.py")
VERSIONS = r"^(WIRE|SCHEMA)_VERSION = "


def oldest_compatible() -> str:
    """Return the revision that introduced today's versions; "" if the history does not reach it.

    The first revision of a shallow clone, which has no parent, seems to introduce everything.
    """
    found = _git("log", "-1", "--format=%H %P", "-G", VERSIONS, "--", *VERSION_FILES)
    revision, _, parent = found.decode().strip().partition(" ")
    return revision if parent else ""


def extract(revision: str, folder: Path) -> Path:
    """Write the files of a revision into a folder and return it."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision))) as archive:
        archive.extractall(folder, filter="data")
    return folder


class OtherTree:
    """The code of another revision for the processes in `names`. Implements `ProcessPlaces`.

    `names` may change; a process that restarts then runs the other code.
    """

    def __init__(self, tree: Path, names: set[str]) -> None:
        self.tree = tree
        self.names = names

    def host(self, name: str) -> str:
        return "127.0.0.1"

    def program(
        self, name: str, module: str, arguments: Sequence[str]
    ) -> tuple[str, Sequence[str]]:
        if name not in self.names:
            return module, arguments
        return __name__, (str(self.tree), module, *arguments)


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, timeout=60, check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        return b""  # no repository, or no git
    return done.stdout


if __name__ == "__main__":
    tree, *command = sys.argv[1:]
    os.chdir(tree)  # the first place where `-m` looks
    os.environ["PYTHONPATH"] = tree
    os.execv(sys.executable, [sys.executable, "-m", *command])
