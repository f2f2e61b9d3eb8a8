"""Conversion of a checkpoint's tokenizer to a `tokenizer.json` with transformers.

    python -m runtime.model_files.tokenizer_conversion FOLDER OUT

It runs in a separate process, because transformers is large and only needed if a checkpoint has no
such file. On failure it exits with code 1 and one line on stderr.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# Packages that read each kind of vocabulary in addition to transformers, whose own message names
# another package.
_READERS = {"*.model": "sentencepiece", "*.tiktoken": "tiktoken"}


def missing_packages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each missing package that reads a vocabulary of the folder, with the name of the file."""
    if find_spec("transformers") is None:
        yield "transformers", "them"
    for pattern, package in _READERS.items():
        file = min(folder.glob(pattern), default=None)
        if file is not None and find_spec(package) is None:
            yield package, file.name


def main() -> None:
    folder, out = sys.argv[1:]
    missing = list(missing_packages(Path(folder)))
    if missing:
        readers = ", ".join(f"{package} for {file}" for package, file in missing)
        sys.exit(f"they need {readers} (pip install {' '.join(package for package, _ in missing)})")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 (any error is the reason to show)
        sys.exit(f"transformers cannot read them: {' '.join(str(error).split())[:300]}")
    if not tokenizer.is_fast:
        sys.exit(f"transformers has no fast form of {type(tokenizer).__name__}")
    tokenizer.backend_tokenizer.save(out)


if __name__ == "__main__":
    main()
