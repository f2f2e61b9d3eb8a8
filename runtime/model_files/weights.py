"""Weight files of a checkpoint, and the approximate memory that they need."""

import json
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEADER_BYTES = 100 << 20
# Codes of 8 bits, and of 4 bits in packed form, become 16 bits each.
_LOADED_FOR_STORED = {"F8_E4M3": 2, "I8": 2, "I32": 4, "U8": 4}
# errors of json and of code that reads its result
_NONSENSE = (ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class WeightFiles:
    """Weight files in name order, each with the tensors that an index lists for it.

    The set of tensors is empty without an index. `notice` is a message for the operator, or "".
    """

    tensors: dict[Path, set[str]]
    notice: str = ""


def weight_files(folder: Path) -> WeightFiles:
    """Return the safetensors files of the checkpoint in `folder`.

    These are the files of its index, or the single one. If `model.safetensors` exists and the index
    does not list it, the index is ignored: tools that merge shards into one file leave it in the
    folder. transformers reads the single file in that case as well.

    Raises:
        ConfigError: neither exists, the index is invalid, or it lists missing files.
    """
    index = folder / _INDEX
    single = folder / _SINGLE
    if not index.exists():
        if not single.is_file():
            raise ConfigError(f"{folder} has neither {_SINGLE} nor {_INDEX}", field="model")
        return WeightFiles({single: set()})
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in sorted(weight_map.items(), key=lambda pair: (pair[1], pair[0])):
            files.setdefault(folder / Path(file).name, set()).add(name)
        if single not in files and single.is_file():
            return WeightFiles(
                {single: set()},
                f"{index} lists other files than {_SINGLE} next to it: the index is ignored, "
                f"and only {_SINGLE} is read",
            )
        absent = [file.name for file in files if not file.is_file()]
    except (OSError, RecursionError, *_NONSENSE) as error:
        raise ConfigError(
            f"{index} is not a safetensors index: {repr(error)[:200]}", field="model"
        ) from error
    if absent:
        raise ConfigError(
            f"{folder} lacks files that its index lists: {shortened(absent)}", field="model"
        )
    return WeightFiles(files)


def shortened(names: list[str]) -> str:
    """Return the first few of a list of names, for a message."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def loaded_bytes(folder: Path) -> int:
    """Return the approximate memory of the weights in `folder` after loading and dequantizing.

    A folder with an invalid index counts all of its files; loading reports the problem.
    """
    try:
        files = list(weight_files(folder).tensors)
    except ConfigError:
        files = [file for file in folder.glob("*.safetensors") if file.is_file()]
    return sum(map(_loaded_bytes, files))


def _loaded_bytes(file: Path) -> int:
    """Return the memory of a file's weights, or its size if its header cannot be read.

    Loading reports the problem.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            header = json.loads(
                stream.read(min(int.from_bytes(stream.read(8), "little"), _HEADER_BYTES))
            )
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                size += (end - start) * (_LOADED_FOR_STORED.get(tensor["dtype"], 1) - 1)
    except (RecursionError, *_NONSENSE):
        return file.stat().st_size
    return size
