"""Access to a checkpoint's raw config.json.

No field is ever used in place of another, and every error names its field.
"""

from collections.abc import Mapping
from pathlib import Path

from runtime.errors import ConfigError
from runtime.model_files.config import context_of, text_fields
from runtime.model_files.model_folder import most, read_object

_DTYPES = ("bfloat16", "float16", "float32")


class RawConfig:
    """One section of a config file, as it is in the file.

    A null value counts as absent, but the architecture's default does not replace it.
    """

    def __init__(self, values: Mapping[str, object], *, where: str = "config.json") -> None:
        self._stated = dict(values)
        self._values = {name: value for name, value in values.items() if value is not None}
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def of_text_model(self) -> "RawConfig":
        """Return the fields of the text model, with defaults for those that the file omits.

        Raises:
            ConfigError: the fields are invalid.
        """
        return RawConfig(text_fields(self._stated), where=self._where)

    def context(self) -> tuple[int, str]:
        """Return the longest context in tokens, and the field that defines it.

        Raises:
            ConfigError: the field is missing or invalid.
        """
        return context_of(self._values)

    def fail(self, name: str, message: str) -> ConfigError:
        """Return the error to raise about field `name`."""
        return ConfigError(f"{self._where}: {name} {message}", field=name)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer from `minimum` to `runtime.model_files.model_folder.most`.

        Raises:
            ConfigError: the value is anything else.
        """
        value = self._read(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not minimum <= value <= most(name)
        ):
            raise self.fail(
                name, f"must be an integer from {minimum} to {most(name)}, is {value!r}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive, finite number.

        Raises:
            ConfigError: the value is anything else.
        """
        value = self._read(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < float("inf")
        ):
            raise self.fail(name, f"must be a positive number, is {value!r}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false.

        Raises:
            ConfigError: the value is neither.
        """
        value = self._read(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, f"must be true or false, is {value!r}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string.

        Raises:
            ConfigError: the value is no string, or is absent and has no default.
        """
        value = self._read(name, default)
        if not isinstance(value, str):
            raise self.fail(name, f"must be a string, is {value!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings.

        Raises:
            ConfigError: the value is anything else.
        """
        value = self._read(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(name, f"must be a list of strings, is {value!r}")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of non-negative integers.

        A single integer is a list of one, and an absent field is an empty list.

        Raises:
            ConfigError: the value is anything else.
        """
        value = self._values.get(name, [])
        items = value if isinstance(value, list) else [value]
        if not all(
            isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items
        ):
            raise self.fail(name, f"must be non-negative integers, is {value!r}")
        return tuple(items)

    def section(self, name: str) -> "RawConfig":
        """Return an object within this section.

        Raises:
            ConfigError: the value is no object.
        """
        value = self._read(name, None)
        if not isinstance(value, dict):
            raise self.fail(name, f"must be an object, is {value!r}")
        return RawConfig(value, where=f"{self._where}: {name}")

    def updated(self, values: Mapping[str, object]) -> "RawConfig":
        """Return the section with these fields replaced."""
        return RawConfig({**self._stated, **values}, where=self._where)

    def as_dict(self) -> dict[str, object]:
        return dict(self._values)

    def require(self, name: str, *, only: object, default: object) -> None:
        """Check that `name` has the only supported value.

        Raises:
            ConfigError: it has another one.
        """
        value = self._values.get(name, default)
        if value != only:
            raise self.fail(name, f"{value!r} is not supported, only {only!r}")

    def _read(self, name: str, default: object) -> object:
        value = self._values.get(name, default)
        if value is None:
            raise self.fail(name, "is missing")
        return value


def read_config_file(path: Path) -> RawConfig:
    """Read one JSON file of a checkpoint.

    Raises:
        ConfigError: the file is missing, unreadable or not a JSON object.
    """
    if not path.exists():
        raise ConfigError(
            f"{path.parent} is not a checkpoint: it has no {path.name}", field="model"
        )
    return RawConfig(read_object(path), where=path.name)


def architecture_of(raw: RawConfig) -> str:
    """Return the single architecture that a config names.

    Raises:
        ConfigError: it names none or several.
    """
    names = raw.texts("architectures")
    if len(names) != 1:
        raise raw.fail("architectures", f"must name one architecture, names {len(names)}")
    return names[0]


def text_config(raw: RawConfig) -> RawConfig:
    """Return the config of the text model, with defaults for fields that the file omits.

    For a wrapper it is its `text_config`, with the few fields that the wrapper has for it.
    """
    return raw.of_text_model()


def has_dtype(raw: RawConfig) -> bool:
    """Return whether the config states the dtype of the model."""
    return "dtype" in raw or "torch_dtype" in raw


def dtype_name(raw: RawConfig) -> str:
    """Return torch's name of the model's dtype.

    `dtype` is the newer spelling of `torch_dtype`.
    """
    name = "dtype" if "dtype" in raw else "torch_dtype"
    value = raw.text(name, "float32")
    if value not in _DTYPES:
        raise raw.fail(name, f"{value!r} is not supported, only {', '.join(_DTYPES)}")
    return value
