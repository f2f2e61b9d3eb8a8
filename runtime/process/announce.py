"""How a process that chose its own ports reports them to its parent: a JSON file that is whole or
absent.

write_announcement(path, announcement)
read_announcement(path) -> Announcement | None
await announced_address(path)                         when there is one
announcement_path("file:///run/prefill-0.json")       the path, where an address may be such a file
"""

import asyncio
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.errors import ConfigError

FILE = "file://"
_LOOK_S = 0.02  # between two looks at a file: it has no event to wait for


@dataclass(frozen=True)
class Announcement:
    """Where a process listens. `incarnation` differs from run to run, also under the same
    address."""

    address: str  # gRPC, HOST:PORT
    metrics_port: int | None
    pid: int
    incarnation: str


def write_announcement(path: Path, announcement: Announcement) -> None:
    """Replace the file atomically. Raises ConfigError when the folder cannot be written, or when
    something that is no file is there: a device would be gone for every process of the machine."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"cannot write {path}: it is no regular file", field="announce")
        draft.write_text(json.dumps(asdict(announcement)))
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="announce") from error


def read_announcement(path: Path) -> Announcement | None:
    """The announcement, or None while there is none. Raises ConfigError when the file is something
    else."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        return Announcement(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not an announcement: {error}", field="announce") from error


def announcement_path(target: str) -> Path | None:
    """The file that a target of the form file:///PATH names; None for any other."""
    return Path(target.removeprefix(FILE)) if target.startswith(f"{FILE}/") else None


async def announced_address(path: Path) -> str:
    """The gRPC address that a process announces there, as soon as it does. The caller ends the
    wait."""
    while (announcement := read_announcement(path)) is None:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    return announcement.address
