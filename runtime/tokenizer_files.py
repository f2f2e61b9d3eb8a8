"""Do two processes read texts alike? The digest of what a model directory's `tokenizer.json` says."""

import hashlib
import json
from pathlib import Path

from runtime.errors import ConfigError

# How a file was saved to cut and pad; servers do neither (`router.text.tokenise`).
_NOT_READ = ("truncation", "padding")


def tokenizer_digest(model_dir: Path) -> str:
    """16 hexadecimal digits of SHA-256; empty without a `tokenizer.json`. Spacing and the order of keys do not count.

    Raises:
        ConfigError: the file is no JSON object.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return ""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object", field="model")
    said = {key: value for key, value in content.items() if key not in _NOT_READ}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
