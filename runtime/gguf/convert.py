"""Conversion of a GGUF file, llama.cpp's format, to a checkpoint folder.

    checkpoint_of(Path("model.gguf")) -> Path            converted once, into the cache folder
    convert(Path("model.gguf"), Path("folder"))

Weights are dequantized by the package gguf, llama.cpp's own, and rounded to bfloat16; a file of float32
stays float32. A file is read and written tensor by tensor.
"""

import fcntl
import hashlib
import json
import os
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np

from runtime.clock import Deadline, SystemClock
from runtime.errors import ConfigError
from runtime.gguf.config import config_of
from runtime.gguf.metadata import GgufMetadata, refused
from runtime.gguf.tensors import ROPE_FREQS, NamedTensor, named_tensors
from runtime.model_files.model_folder import gguf_file
from runtime.model_files.tokenizer_files import cache_folder

VERSION = 1  # of the conversion; another one converts a cached file again
_MAGIC = b"GGUF"
_DTYPES = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}
_ALIGNMENT = 8
CONVERSION_S = 3600.0  # limit of another process's conversion, of a very large file on a slow disk
_LOOK_S = 0.2


OnProgress = Callable[[int, int], None]
"""Called with the bytes that are written and those of all weights."""


def _silent(_done: int, _total: int) -> None:
    pass


def converted_path(file: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the cache that has the checkpoint of a GGUF file, once it was converted."""
    status = file.stat()
    identity = f"{VERSION} {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return cache_folder(environment) / "gguf" / digest / file.stem


def checkpoint_of(
    path: Path, environment: Mapping[str, str] = os.environ, progress: OnProgress = _silent
) -> Path:
    """Return the checkpoint of a GGUF file, which is converted first if it was not; any other path as
    it is.

    Raises:
        ConfigError: the file cannot be converted, or the cache folder cannot be written.
    """
    file = gguf_file(path)
    if file is None:
        return path
    folder = converted_path(file, environment)
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with (folder.parent / "lock").open("w") as lock:
                _wait_for(lock)  # another process may convert it now
                if not folder.is_dir():
                    convert(file, folder, progress)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be converted into {folder.parent}: {error.strerror or error}; "
                "BATON_CACHE_DIR selects another place",
                field="model",
            ) from error
    return folder


def _wait_for(lock: IO[str]) -> None:
    """Lock the file. Raises OSError if another process has it for longer than `CONVERSION_S`."""
    deadline = Deadline.after(SystemClock(), CONVERSION_S)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if deadline.is_over:
                raise TimeoutError(
                    f"another process has been converting it for {CONVERSION_S:g} s"
                ) from None
            time.sleep(_LOOK_S)
        else:
            return


def convert(file: Path, folder: Path, progress: OnProgress = _silent) -> None:
    """Write the checkpoint of a GGUF file into a folder, which must not exist.

    Raises:
        ConfigError: the package gguf is missing, the file is damaged or of a kind that is not
            supported.
        OSError: the folder cannot be written; nothing of it is left.
    """
    if find_spec("gguf") is None:
        raise ConfigError(
            f"{file} is GGUF, llama.cpp's format, which needs the package gguf: pip install "
            "'baton[gguf]'",
            field="model",
        )
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        metadata, stored = _read(file)
        _write(metadata, stored, unfinished, progress)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read(file: Path) -> tuple[GgufMetadata, list[Any]]:
    """Return the metadata and the tensors, whose data are mapped and not read."""
    from gguf import GGUFReader

    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{file} is not a GGUF file", field="model")
    try:
        reader = GGUFReader(file)
        values = {name: field.contents() for name, field in reader.fields.items() if field.types}
    # The package reads counts and offsets of the file without checks.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{file} is damaged or cut off: {reason}", field="model") from error
    if values.get("split.count", 1) not in (0, 1):
        raise refused("files split into several are not supported: join them by llama-gguf-split")
    return GgufMetadata(values), list(reader.tensors)


def _write(metadata: GgufMetadata, stored: list[Any], folder: Path, progress: OnProgress) -> None:
    """Write the files of the checkpoint."""
    from runtime.gguf.tokenizer import id_of, token_of, tokenizer_of, vocabulary_size

    by_name = {each.name: each for each in stored}
    factors = by_name.get(ROPE_FREQS)
    config = config_of(
        metadata,
        _rows(by_name, "token_embd.weight"),
        frozenset(by_name),
        None if factors is None else factors.data,
    )
    if vocabulary_size(metadata) > _rows(by_name, "token_embd.weight"):
        raise refused("there are more tokens than rows of token_embd.weight")
    tensors = [made for each in stored for made in named_tensors(metadata, each)]
    dtype = _dtype(stored)
    ends = [index for name in ("eos", "eot") if (index := id_of(metadata, name)) is not None]
    config["dtype"] = dtype
    config["bos_token_id"] = id_of(metadata, "bos")
    config["eos_token_id"] = ends
    special = {
        "bos_token": token_of(metadata, "bos"),
        "eos_token": token_of(metadata, "eos"),
        "unk_token": token_of(metadata, "unknown"),
        "pad_token": token_of(metadata, "padding"),
        "add_bos_token": metadata.optional("tokenizer.ggml.add_bos_token"),
        "chat_template": metadata.optional("tokenizer.chat_template"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    documents = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": ends,
        },
        "tokenizer_config.json": {
            name: value for name, value in special.items() if value is not None
        },
    }
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False))
    tokenizer_of(metadata).save(str(folder / "tokenizer.json"))
    total = sum(int(np.prod(tensor.shape)) for tensor in tensors) * _DTYPES[dtype][1]
    with (folder / "model.safetensors").open("wb") as out:
        for block in _safetensors(tensors, dtype):
            out.write(block)
            progress(min(out.tell(), total), total)
        out.flush()
        os.fsync(out.fileno())


def _rows(by_name: Mapping[str, Any], name: str) -> int:
    if name not in by_name:
        raise refused(f"tensor {name!r} is missing")
    return int(by_name[name].data.shape[0])


def _dtype(stored: list[Any]) -> str:
    """Return the dtype of the checkpoint: float32 if that is what the matrices are stored in."""
    kinds = Counter(each.tensor_type.name for each in stored if len(each.shape) > 1)
    return "float32" if set(kinds) == {"F32"} else "bfloat16"


def _safetensors(tensors: list[NamedTensor], dtype: str) -> Iterator[bytes]:
    """Yield a safetensors file: the length of the header, the header, the values in its order."""
    code, width = _DTYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        if tensor.name in header:
            raise refused(f"tensor {tensor.name!r} is there twice")
        end = at + int(np.prod(tensor.shape)) * width
        header[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors:
        for part in tensor.parts():
            yield (part if dtype == "float32" else to_bfloat16(part)).tobytes()


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to the nearest bfloat16, ties to even, as uint16 bits.

    NaN keeps its sign and stays one.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
        rounded[is_nan] = ((bits[is_nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return rounded
