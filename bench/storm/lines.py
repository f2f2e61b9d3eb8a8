"""Destination of the lines of a cluster's processes."""

import time
from pathlib import Path


class LineFile:
    """`LogSink` into a file, with the times that faults use; without a path it drops lines."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("w", buffering=1)

    def __call__(self, name: str, line: str) -> None:
        if self._file is not None:
            self._file.write(f"{time.monotonic():.3f} {name:12} {line}\n")
