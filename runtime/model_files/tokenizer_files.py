"""Location of a model directory's tokenizer, and its digest for comparing processes.

A directory without `tokenizer.json` may have the files from which one is made. transformers, if it
is installed, makes one in a separate process and writes it to a cache folder. No file is written to
the checkpoint's directory.

    find_tokenizer(model_dir) -> Path | None             its own, or one that was made before
    make_tokenizer(model_dir) -> str                     make one if it has none; a message for the operator
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from runtime.model_files.model_folder import read_object
from runtime.process.child_process import program

# Settings for truncation and padding, neither of which servers do (`router.text.tokenizer`).
_NOT_READ = ("truncation", "padding")
# Files from which tokenizers are made, and files that configure that.
_VOCABULARIES = (
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
)
_SAYS_HOW = (
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
# Mistral's format: transformers reads it with a package of Mistral's and has no tokenizer.json for
# it.
_TEKKEN = "tekken.json"
_MAKE_S = 120.0
_TOKENS_ONLY = (
    "texts and chats are rejected, prompts must be token ids (baton generate --ids 1,2,3)"
)


def find_tokenizer(model_dir: Path, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the `tokenizer.json` of a model directory, or None if there is none.

    This is its own file, or one that was made from its other files.
    """
    if (own := model_dir / "tokenizer.json").is_file():
        return own
    made = _made_path(model_dir, environment)
    return made if made is not None and made.is_file() else None


def make_tokenizer(model_dir: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Make a `tokenizer.json` for a directory that has none, if that is possible.

    Returns one line about the result, or "" for a directory with its own file. Takes seconds, once.
    """
    if (model_dir / "tokenizer.json").is_file():
        return ""
    made = _made_path(model_dir, environment)
    if made is None:
        beside = (
            f" but {_TEKKEN}, a format of Mistral's that is not supported"
            if (model_dir / _TEKKEN).is_file()
            else ""
        )
        return f"{model_dir} has no tokenizer.json{beside}: {_TOKENS_ONLY}"
    if not made.is_file() and (problem := _make(model_dir, made)):
        return (
            f"{model_dir} has no tokenizer.json, and none could be made from its other files: {problem}; "
            f"{_TOKENS_ONLY}"
        )
    return f"{model_dir} has no tokenizer.json: {made} is used, which transformers made from its other files"


def _made_path(model_dir: Path, environment: Mapping[str, str]) -> Path | None:
    """Return the path of the file made from these vocabularies, or None without a vocabulary."""
    vocabularies = [file for pattern in _VOCABULARIES for file in sorted(model_dir.glob(pattern))]
    if not vocabularies:
        return None
    digest = hashlib.sha256()
    for file in (*vocabularies, *(model_dir / name for name in _SAYS_HOW)):
        if file.is_file():
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    return cache_folder(environment) / "tokenizers" / digest.hexdigest()[:16] / "tokenizer.json"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return BATON_CACHE_DIR, or a folder of the user's cache directory."""
    if own := environment.get("BATON_CACHE_DIR"):
        return Path(own)
    user = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/tmp")) / ".cache"
    return Path(user) / "baton"


def _make(model_dir: Path, made: Path) -> str:
    """Make the file; return the problem, or "" on success."""
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        draft = made.with_name(f".{made.name}.{os.getpid()}")
        done = subprocess.run(
            program("runtime.model_files.tokenizer_conversion", str(model_dir), str(draft)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MAKE_S,
            check=False,
        )
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        draft.replace(made)
    except OSError as error:
        return f"{made.parent} cannot be written: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it took more than {_MAKE_S:g} s"
    return ""


def tokenizer_digest(model_dir: Path) -> str:
    """Return 16 hexadecimal digits of SHA-256, or "" without a tokenizer.

    Whitespace and the order of keys do not matter.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    path = find_tokenizer(model_dir)
    if path is None:
        return ""
    said = {key: value for key, value in read_object(path).items() if key not in _NOT_READ}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def token_texts(model_dir: Path) -> dict[int, str]:
    """Return the tokens of a tokenizer by id, in its own spelling; none without a tokenizer.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    path = find_tokenizer(model_dir)
    if path is None:
        return {}
    content = read_object(path)
    model = content.get("model")
    known = model.get("vocab") if isinstance(model, dict) else None
    found: dict[int, str] = {}
    if isinstance(known, dict):
        found = {token_id: text for text, token_id in known.items() if isinstance(token_id, int)}
    elif isinstance(known, list):  # pairs of text and score
        found = {token_id: str(pair[0]) for token_id, pair in enumerate(known) if pair}
    added = content.get("added_tokens")
    for each in added if isinstance(added, list) else ():
        if isinstance(each, dict) and isinstance(each.get("id"), int):
            found[each["id"]] = str(each.get("content"))
    return found
