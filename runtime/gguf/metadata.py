"""GgufMetadata of a GGUF file, read with checks that name the key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import ConfigError


def refused(message: str) -> ConfigError:
    """Return the error of a file that cannot be converted."""
    return ConfigError(f"GGUF: {message}", field="model")


@dataclass(frozen=True)
class GgufMetadata:
    """Values by key. Keys of the architecture are given without their prefix, `llama.` for example."""

    values: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the architecture. Raises ConfigError if it is absent without default."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(f"{self.architecture}.{key} must be a number, got {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer of the architecture. Raises ConfigError if it is none."""
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise refused(f"{self.architecture}.{key} must be a positive integer, got {value!r}")
        return int(value)

    def has(self, key: str) -> bool:
        """Return whether the architecture's key is there."""
        return f"{self.architecture}.{key}" in self.values

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text by its whole key. Raises ConfigError if it is absent without default."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise refused(f"{key} must be a text, got {value!r}")
        return value

    def optional(self, key: str) -> Any:  # noqa: ANN401 - numbers, texts and lists
        """Return a value by its whole key, or None."""
        return self.values.get(key)
