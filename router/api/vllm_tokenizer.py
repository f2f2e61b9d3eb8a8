"""Tokenizer files for gateways: a carrying tokenizer and template, or the model's own files."""

import hashlib
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from router.text.carrier import TextCarrier, carrying_template, carrying_tokenizer
from router.text.model_facts import ServedModel
from runtime.model_files.config import read_if_there
from runtime.model_files.tokenizer_files import find_tokenizer

# Gateways first load a tokenizer's name as a path on their own host, and request the files from a
# router if that fails.
NOWHERE = "/nonexistent/baton"
_OWN_FILES = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
)


@dataclass(frozen=True)
class GatewayTokenizer:
    """The files by name, and the folder with their copy for gateways on this host.

    `carrier` decodes the texts that they carry; None if they are the model's own files.
    """

    files: Mapping[str, bytes]
    folder: str
    carrier: TextCarrier | None = None

    def zipped(self) -> tuple[bytes, str]:
        """Return a reproducible archive of the files, and its SHA-256."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in self.files.items():
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        data = buffer.getvalue()
        return data, hashlib.sha256(data).hexdigest()


def gateway_tokenizer(folder: Path, model: ServedModel, cache: Path) -> GatewayTokenizer | None:
    """Return the files that a gateway gets for the model in a folder; None without a tokenizer.

    Takes seconds for large vocabularies. Carrying files are stored in `cache` if it is writable, so
    that a gateway on this host can start before the router is ready.
    """
    path = find_tokenizer(folder)
    text_tokenizer = model.text_tokenizer
    if path is None or text_tokenizer is None:
        return None
    carrying = carrying_tokenizer(text_tokenizer.tokenizer, path.read_text(encoding="utf-8"))
    if carrying is None:
        others = {
            name: (folder / name).read_bytes() for name in _OWN_FILES if (folder / name).is_file()
        }
        return GatewayTokenizer(
            {"tokenizer.json": path.read_bytes(), **others}, str(folder.absolute())
        )
    config = read_if_there(folder / "tokenizer_config.json")
    files = {
        "tokenizer.json": carrying,
        # Omits the class and architecture, for which gateways have special treatment.
        "tokenizer_config.json": json.dumps(
            {name: value for name, value in config.items() if name.endswith("_token")}
        ),
        "config.json": json.dumps({"eos_token_id": list(model.facts.eos_token_ids)}),
    }
    if text_tokenizer.chat_template is not None:
        files["chat_template.jinja"] = carrying_template(text_tokenizer.chat_template)
    carried = {name: text.encode() for name, text in files.items()}
    return GatewayTokenizer(carried, _kept(carried, cache), TextCarrier(text_tokenizer.tokenizer))


def _kept(files: Mapping[str, bytes], cache: Path) -> str:
    """Return the folder of `cache` with these files, written if missing; `NOWHERE` on failure."""
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    kept = cache.absolute() / digest.hexdigest()[:16]
    if kept.is_dir():
        return str(kept)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=cache))
        try:
            for name, data in files.items():
                (draft / name).write_bytes(data)
            draft.rename(kept)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError:
        pass  # another router wrote the files meanwhile, or the cache is not writable
    return str(kept) if kept.is_dir() else NOWHERE
