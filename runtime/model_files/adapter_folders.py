"""The folders and names of LoRA adapters, without their content."""

import re
from pathlib import Path

from runtime.errors import ConfigError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_ADAPTERS = 64
# Part of a model's name in the API, after a colon.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = "@"  # in no name


def adapter_key(name: str, digest: str) -> str:
    """Return what identifies an adapter of this name and content between processes."""
    return f"{name}{_DIGEST}{digest}"


def adapter_name(key: str) -> str:
    """Return the name in the key of an adapter."""
    return key.partition(_DIGEST)[0]


def is_adapter_name(name: str) -> bool:
    """Return whether an adapter may have this name."""
    return _NAME.fullmatch(name) is not None


def adapter_folders(folder: Path) -> list[Path]:
    """Return the subfolders of `folder` in name order. Each holds one adapter and names it.

    Hidden subfolders are ignored, and so are files.

    Raises:
        ConfigError: there are more than `MAX_ADAPTERS`, or one has no adapter in it or no valid name.
    """
    try:
        found = sorted(
            path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}", field="adapters") from error
    if len(found) > MAX_ADAPTERS:
        raise ConfigError(
            f"{folder} has {len(found)} folders of adapters; there may be up to {MAX_ADAPTERS}, each a "
            f"subfolder with {CONFIG} and {WEIGHTS}",
            field="adapters",
        )
    return [adapter_folder(folder, path.name) for path in found]


def adapter_folder(folder: Path, name: str) -> Path:
    """Return the subfolder with the adapter of this name.

    Raises:
        ConfigError: there is none, or it is no name of an adapter.
    """
    if not is_adapter_name(name):
        raise ConfigError(
            f"{name[:80]!r} is no name of an adapter: up to 64 letters, digits, '.', '_' and '-'",
            field="adapters",
        )
    path = folder / name
    missing = [file for file in (CONFIG, WEIGHTS) if not (path / file).is_file()]
    if missing:
        raise ConfigError(f"{path} has no {' and no '.join(missing)}", field="adapters")
    return path
