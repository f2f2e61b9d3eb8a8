"""`python -m runtime.tokenizer_conversion FOLDER OUT`: write what transformers reads of FOLDER as a `tokenizer.json`.

A process of its own, because transformers is large and only needed where a checkpoint has no such file. Exit code 1
with one line on stderr where it cannot be done.
"""

import sys


def main() -> None:
    folder, out = sys.argv[1:]
    try:
        from transformers import AutoTokenizer
    except ImportError:
        sys.exit("transformers is not installed (pip install transformers)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - whatever it meets is the reason that is shown
        sys.exit(f"transformers cannot read them: {' '.join(str(error).split())[:300]}")
    if not tokenizer.is_fast:
        sys.exit(f"transformers has no fast form of {type(tokenizer).__name__}")
    tokenizer.backend_tokenizer.save(out)


if __name__ == "__main__":
    main()
