"""How a process that chose its own ports tells its parent: a JSON file that is whole or absent.

    write_announcement(path, announcement)
    read_announcement(path) -> Announcement | None
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.errors import ConfigError


@dataclass(frozen=True)
class Announcement:
    """Where a process listens. `incarnation` differs from run to run, also under the same address."""

    address: str  # gRPC, HOST:PORT
    metrics_port: int | None
    pid: int
    incarnation: str


def write_announcement(path: Path, announcement: Announcement) -> None:
    """Replace the file atomically. Raises ConfigError when the folder cannot be written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(asdict(announcement)))
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="announce") from error


def read_announcement(path: Path) -> Announcement | None:
    """The announcement, or None while there is none. Raises ConfigError when the file is something else."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        return Announcement(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not an announcement: {error}", field="announce") from error
