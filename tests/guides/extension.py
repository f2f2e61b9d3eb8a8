"""A copy of the repository to which a guide's steps are applied, and a program that uses it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
# Compiled kernels are copied, too: they are kept beside their source. Files that another process is
# about to rename are not.
UNFINISHED = shutil.ignore_patterns("*.tmp.*", "*.pyc.*")


class Extension:
    """A copy of the repository. Only the given folders are copied; the others are links."""

    def __init__(self, folder: Path, *copied: str) -> None:
        self.folder = folder
        self.touched: list[str] = []
        for path in ROOT.iterdir():
            if path.name in copied:
                shutil.copytree(path, folder / path.name, ignore=UNFINISHED)
            elif not path.name.startswith("."):
                (folder / path.name).symlink_to(path)

    def add(self, path: str, text: str) -> None:
        """Add a file."""
        target = self.folder / path
        assert not target.exists()
        target.write_text(text)
        self.touched.append(path)

    def register(self, path: str, after: str, line: str) -> None:
        """Insert one line after the line that begins with `after`."""
        target = self.folder / path
        lines = target.read_text().splitlines(keepends=True)
        place = next(place for place, each in enumerate(lines) if each.startswith(after))
        lines.insert(place + 1, line + "\n")
        self._rewrite(path, "".join(lines))

    def replace(self, path: str, old: str, new: str) -> None:
        """Replace a text that the file has once."""
        text = (self.folder / path).read_text()
        assert text.count(old) == 1
        self._rewrite(path, text.replace(old, new))

    def _rewrite(self, path: str, text: str) -> None:
        (self.folder / path).write_text(text)
        if path not in self.touched:
            self.touched.append(path)

    def run(self, program: str) -> str:
        """Run a program in the copy; return what it prints."""
        child = subprocess.run(
            [sys.executable, "-c", program],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert child.returncode == 0, child.stderr[-4000:]
        return child.stdout
