"""Where the lines of a cluster's processes go."""

import time
from pathlib import Path


class LineFile:
    """A `LogSink` into a file, with the time of each line as faults have it; nowhere without a
    path."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("w", buffering=1)

    def __call__(self, name: str, line: str) -> None:
        if self._file is not None:
            self._file.write(f"{time.monotonic():.3f} {name:12} {line}\n")
