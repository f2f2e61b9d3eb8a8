"""Validation of checkpoint folders.

Errors name what the folder contains instead, and the next step. The check reads names and the first
bytes of small files; it loads no weights.
"""

import json
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError

_LFS_HEAD = b"version https://git-lfs.github.com/spec/"
_LFS_BYTES = 1024  # a pointer is smaller, the file that it replaces is larger
# Limits of a number in a config.json and of the number of layers. No published model comes near
# them, and work or messages in proportion to them stay bounded.
MAX_NUMBER = 1 << 24
MAX_LAYERS = 10_000
_POINTED_AT = ("config.json", "tokenizer.json", "tokenizer.model", "*.safetensors", "*.bin")


def check_model_folder(
    folder: Path, *, field: str = "model", flag: str = "", needs_weights: bool = True
) -> None:
    """Check that the folder is a checkpoint.

    `field` is the setting that named the folder. `flag` is the text before it on the command line,
    by default the setting's flag.

    Raises:
        ConfigError: it has no config.json, it has no safetensors files although they are needed, or
            it has git-LFS pointers in their place.
    """
    if problem := _problem(folder, flag or f"--{field}", needs_weights=needs_weights):
        raise ConfigError(problem, field=field)


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that a path means: itself, or the only one of a folder without weights of
    another format; None if it means none.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    found = sorted(path.glob("*.gguf"))
    return found[0] if len(found) == 1 and not any(path.glob("*.safetensors")) else None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint.

    Raises:
        ConfigError: the file cannot be read or does not contain an object.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a JSON object", field="model")
    return content


def most(name: str) -> int:
    """Return the largest allowed value of the field."""
    return MAX_LAYERS if name.endswith("_layers") else MAX_NUMBER


def _problem(folder: Path, flag: str, *, needs_weights: bool) -> str:
    """Return the problem with a folder, or "" if there is none."""
    if not folder.exists():
        return _absent(folder, flag)
    if folder.is_file():
        return _file(folder, flag)
    if pointers := _lfs_pointers(folder):
        return (
            f"{folder} has git-LFS pointers where files should be ({', '.join(pointers[:3])}"
            f"{' ...' if len(pointers) > 3 else ''}): run `git lfs pull` in it"
        )
    has_weights = (
        any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file()
    )
    if (folder / "adapter_config.json").is_file() and not (
        has_weights and (folder / "config.json").is_file()
    ):
        return _adapter(folder)
    if (has_weights or not needs_weights) and (folder / "config.json").is_file():
        return ""
    return _other_layout(folder, flag, has_weights=has_weights)


def _absent(folder: Path, flag: str) -> str:
    """Describe a missing folder. A name on the Hub has the form OWNER/NAME."""
    parts = folder.parts
    if not folder.is_absolute() and len(parts) == 2 and parts[0] not in (".", ".."):
        return (
            f"{folder} is not a folder here. If it is a model's name on the Hugging Face Hub, download it first: "
            f"`hf download {folder} --local-dir {parts[1]}`, then {flag} {parts[1]}"
        )
    return f"{folder} does not exist; {flag} takes the folder of a checkpoint"


def _file(file: Path, flag: str) -> str:
    if file.suffix == ".gguf":
        return _gguf(file)
    return f"{file} is a file; {flag} takes the folder of a checkpoint, with config.json and *.safetensors in it"


def _gguf(path: Path) -> str:
    return (
        f"{path} is GGUF, llama.cpp's format: `baton up`, `baton serve` and `baton check` convert it; for other "
        f"commands run `baton convert {path} FOLDER` and give FOLDER"
    )


def _adapter(folder: Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))[
            "base_model_name_or_path"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        base = "its base model"
    return (
        f"{folder} is an adapter (LoRA) of {base}, not a model: give {base}, and --adapters with the "
        f"folder that {folder.name} is in"
    )


def _other_layout(folder: Path, flag: str, *, has_weights: bool) -> str:
    if snapshots := sorted((folder / "snapshots").glob("*/config.json")):
        return f"{folder} is a folder of the Hub's cache: give {flag} {snapshots[-1].parent}"
    if not has_weights and (gguf := sorted(folder.glob("*.gguf"))):
        if len(gguf) > 1:
            return (
                f"{folder} has {len(gguf)} GGUF files: give {flag} one of them, such as {gguf[0]}"
            )
        return _gguf(gguf[0])
    if not has_weights and any(
        (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))
    ):
        return (
            f"{folder} has its weights as pickles (.bin, .pt, .pth), which run code when they are read, so Baton "
            f"does not read them: convert them with transformers (AutoModelForCausalLM.from_pretrained, then "
            f"save_pretrained) and give the folder of the result"
        )
    missing = [
        name
        for name, is_there in (
            ("config.json", (folder / "config.json").is_file()),
            ("*.safetensors", has_weights),
        )
        if not is_there
    ]
    return f"{folder} is not a model directory: it has no {' and no '.join(missing)}"


def _lfs_pointers(folder: Path) -> list[str]:
    found = []
    for file in sorted(match for pattern in _POINTED_AT for match in folder.glob(pattern)):
        if file.is_file() and file.stat().st_size < _LFS_BYTES:
            with file.open("rb") as stream:
                if stream.read(len(_LFS_HEAD)) == _LFS_HEAD:
                    found.append(file.name)
    return found
