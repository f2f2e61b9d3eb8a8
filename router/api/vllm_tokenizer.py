"""What gateways get to read texts with: a tokenizer and a template that carry them here, or the model's own files."""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from router.text.carrier import TextCarrier, carrying_template, carrying_tokenizer
from router.text.model_facts import ServedModel
from runtime.model_files.config import read_if_there
from runtime.tokenizer_files import find_tokenizer

_OWN_FILES = ("tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json",
              "special_tokens_map.json")


@dataclass(frozen=True)
class GatewayTokenizer:
    """The files by name. `carrier` reads the texts that they carry; None where they are the model's own."""

    files: Mapping[str, bytes]
    carrier: TextCarrier | None = None

    def zipped(self) -> tuple[bytes, str]:
        """Return an archive, the same bytes for the same files, and its SHA-256."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in self.files.items():
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        data = buffer.getvalue()
        return data, hashlib.sha256(data).hexdigest()


def gateway_tokenizer(folder: Path, model: ServedModel) -> GatewayTokenizer | None:
    """Return what a gateway gets for the model in a folder; None without a tokenizer. Takes seconds for large
    vocabularies."""
    path, tokeniser = find_tokenizer(folder), model.tokeniser
    if path is None or tokeniser is None:
        return None
    carrying = carrying_tokenizer(tokeniser.tokenizer, path.read_text(encoding="utf-8"))
    if carrying is None:
        others = {name: (folder / name).read_bytes() for name in _OWN_FILES if (folder / name).is_file()}
        return GatewayTokenizer({"tokenizer.json": path.read_bytes(), **others})
    config = read_if_there(folder / "tokenizer_config.json")
    files = {
        "tokenizer.json": carrying,
        # Without what a gateway would do for a class or an architecture that it knows.
        "tokenizer_config.json": json.dumps({name: value for name, value in config.items() if name.endswith("_token")}),
        "config.json": json.dumps({"eos_token_id": list(model.facts.eos_token_ids)}),
    }
    if tokeniser.chat_template is not None:
        files["chat_template.jinja"] = carrying_template(tokeniser.chat_template)
    return GatewayTokenizer({name: text.encode() for name, text in files.items()}, TextCarrier(tokeniser.tokenizer))
