"""Announcement of a process that chose its own ports to its parent, in a JSON file.

The file is either complete or absent.

write_announcement(path, announcement) read_announcement(path) -> Announcement | None await
announced_address(path)                         waits for the file
announcement_path("file:///run/prefill-0.json")       the path, if an address may be such a file
"""

import asyncio
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.errors import ConfigError

FILE = "file://"
_LOOK_S = 0.02  # polling interval: the file has no event to wait for


@dataclass(frozen=True)
class Announcement:
    """Address and ports of a process. `incarnation` differs in every run, even at the same address."""

    address: str  # gRPC, HOST:PORT
    metrics_port: int | None
    pid: int
    incarnation: str


def write_announcement(path: Path, announcement: Announcement) -> None:
    """Replace the file atomically.

    Raises ConfigError if the folder cannot be written or the path is not a regular file: to replace
    a device would break it for every process of the machine.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"cannot write {path}: it is not a regular file", field="announce")
        draft.write_text(json.dumps(asdict(announcement)))
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="announce") from error


def read_announcement(path: Path) -> Announcement | None:
    """Return the announcement, or None while the file does not exist.

    Raises ConfigError if the file is not an announcement.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        return Announcement(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not an announcement: {error}", field="announce") from error


def announcement_path(target: str) -> Path | None:
    """Return the path of a target of the form file:///PATH, or None for any other target."""
    return Path(target.removeprefix(FILE)) if target.startswith(f"{FILE}/") else None


async def announced_address(path: Path) -> str:
    """Wait until a process announces its gRPC address at `path`, and return it.

    The caller limits the wait.
    """
    while (announcement := read_announcement(path)) is None:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    return announcement.address
