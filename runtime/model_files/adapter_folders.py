"""The folders of LoRA adapters, without their content."""

import re
from pathlib import Path

from runtime.errors import ConfigError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_ADAPTERS = 64
# Part of a model's name in the API, after a colon.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def adapter_folders(folder: Path) -> list[Path]:
    """Return the subfolders of `folder` in name order. Each holds one adapter and names it.

    Hidden subfolders are ignored, and so are files.

    Raises:
        ConfigError: there are none or more than `MAX_ADAPTERS`, or one has no adapter in it or no
            valid name.
    """
    try:
        found = sorted(
            path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}", field="adapters") from error
    if not 1 <= len(found) <= MAX_ADAPTERS:
        raise ConfigError(
            f"{folder} has {len(found)} folders of adapters; there must be 1 to {MAX_ADAPTERS}, each a "
            f"subfolder with {CONFIG} and {WEIGHTS}",
            field="adapters",
        )
    for path in found:
        if _NAME.fullmatch(path.name) is None:
            raise ConfigError(
                f"{path.name[:80]!r} is no name of an adapter: up to 64 letters, digits, '.', '_' and '-'",
                field="adapters",
            )
        missing = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
        if missing:
            raise ConfigError(f"{path} has no {' and no '.join(missing)}", field="adapters")
    return found
