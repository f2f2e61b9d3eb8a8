"""Settings: frozen pydantic models filled from flags and one TOML file.

    class PrefillConfig(Config): ...                                   rejects unknown keys
    load(PrefillConfig, section="prefill", flags={...}, file=path)     flags override the file, which overrides defaults
    describe(config) -> dict[str, object]                              the effective values, for the log
    parse_address("HOST:PORT") -> Address; AddressField for models

The TOML file has one table per role, so that a whole cluster can share it.
"""

import ipaddress
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from runtime.errors import ConfigError

SECTIONS = ("router", "prefill", "decode", "worker", "gateway", "planner")
_MAX_PORT_DIGITS = 5
# Limit of every setting in seconds: gRPC counts milliseconds in 32 bits, which is 24 days.
MAX_WAIT_S = 86_400


class Config(BaseModel):
    """Root of all settings. Instances are immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class Address:
    """Address on which a server listens or can be reached. With port 0 the system chooses a port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Return whether the address is reachable from this machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_name(self) -> bool:
        """Return whether the host has to be resolved."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return True
        return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, field: str = "address") -> Address:
    """Parse HOST:PORT or [IPV6]:PORT. Raises ConfigError naming `field`."""
    host, colon, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]") and len(host) > 2
    plain = host[1:-1] if in_brackets else host
    if not colon or not plain or set(plain) & set("[]") or (":" in plain and not in_brackets):
        raise ConfigError(f"{field} must be HOST:PORT, got {text!r}", field=field)
    if (
        not port.isascii()
        or not port.isdigit()
        or len(port) > _MAX_PORT_DIGITS
        or int(port) > 65535
    ):
        raise ConfigError(f"{field} must end in a port from 0 to 65535, got {text!r}", field=field)
    if not _can_be_looked_up(plain):
        raise ConfigError(
            f"{field} must have a host name of parts of 1 to 63 characters, got {text!r}",
            field=field,
        )
    return Address(plain, int(port))


def _can_be_looked_up(host: str) -> bool:
    """Return whether a resolver accepts the name; Python's resolver raises other errors otherwise."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return host.isprintable() and " " not in host


def accepted_by(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return a validator of a text field that leaves the text as it is.

    A ConfigError of `parse` becomes the ValueError that pydantic expects.
    """

    def validator(text: str) -> str:
        try:
            parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return text

    return validator


def _checked_address(text: str) -> str:
    try:
        return str(parse_address(text))
    except ConfigError as error:
        raise ValueError(str(error)) from None


AddressField = Annotated[str, AfterValidator(_checked_address)]


def load(
    kind: type[ConfigT], *, section: str, flags: Mapping[str, object], file: Path | None = None
) -> ConfigT:
    """Build the settings of one role; flags that are None count as not given.

    Raises ConfigError naming the key for unknown keys, unreadable files and invalid values.
    """
    values: dict[str, object] = {} if file is None else dict(read_tables(file).get(section, {}))
    values.update({key: value for key, value in flags.items() if value is not None})
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if missing := [
            str(each["loc"][0]) for each in error.errors(include_url=False) if _is_missing(each)
        ]:
            flags_named = ", ".join(f"--{key.replace('_', '-')}" for key in missing)
            raise ConfigError(
                f"{flags_named} must be given, or set in the table [{section}] of --config",
                field=missing[0],
            ) from error
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"{section}.{key}: unknown setting{did_you_mean(key, kind.model_fields)}", field=key
            ) from error
        raise ConfigError(f"{section}.{key}: {_problem(first)}", field=key) from error


def _problem(error: Mapping[str, Any]) -> str:
    """Describe the problem with a value, including the value. `error` is one of pydantic's errors."""
    if error["type"] == "value_error":  # one of Baton's own errors, which includes the value
        return str(error["ctx"]["error"])
    return f"{error['msg']} (got {error['input']!r})"


def _is_missing(error: Mapping[str, Any]) -> bool:
    """Return whether a required setting is missing or a required list is empty.

    `error` is one of pydantic's errors.
    """
    return error["type"] == "missing" or (error["type"] == "too_short" and not error["input"])


def read_tables(file: Path) -> dict[str, dict[str, object]]:
    """Return the tables of the file by role.

    Raises ConfigError for a file that cannot be read and for a table of an unknown role.
    """
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", field="config") from error
    # ValueError includes invalid UTF-8; RecursionError comes from very deep nesting.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not TOML: {error}", field="config") from error
    for name, table in tables.items():
        if name in SECTIONS and not isinstance(table, dict):
            raise ConfigError(
                f"{file}: {name} must be a table, [{name}], got {table!r}", field=name
            )
        if name not in SECTIONS:
            raise ConfigError(
                f"{file}: {name!r} is not one of the tables {', '.join(SECTIONS)}"
                f"{did_you_mean(name, SECTIONS)}",
                field=name,
            )
    return tables


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word, or "" if no known word is similar."""
    like = get_close_matches(word.replace("-", "_"), list(known), n=1)
    return f"; did you mean {like[0]}?" if like else ""


def describe(config: Config) -> dict[str, object]:
    """Return the effective values by key, in the form that the file accepts."""
    return config.model_dump(mode="json")


def parse_peer(text: str, *, field: str = "address") -> Address:
    """Parse the address of a server to call. Raises ConfigError naming `field`."""
    address = parse_address(text, field=field)
    if not address.port:
        raise ConfigError(f"{field} must end in a port from 1 to 65535, got {text!r}", field=field)
    return address


def _checked_peer(text: str) -> str:
    try:
        return str(parse_peer(text))
    except ConfigError as error:
        raise ValueError(str(error)) from None


PeerField = Annotated[str, AfterValidator(_checked_peer)]


def number_from_environment(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number that a launcher set, or None if the variable is not set.

    Raises ConfigError naming the variable.
    """
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_PORT_DIGITS:
        raise ConfigError(f"{name} must be a number from 0 to 99999, got {text!r}", field=name)
    return int(text)


def leader_from_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the leader's address as launchers set it, or None unless both variables are set.

    The variables are MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: one of them is invalid; the message names it.
    """
    host = environment.get("MASTER_ADDR")
    port = environment.get("MASTER_PORT")
    if not host or not port:
        return None
    if (
        not port.isascii()
        or not port.isdigit()
        or len(port) > _MAX_PORT_DIGITS
        or not 0 < int(port) < 65536
    ):
        raise ConfigError(
            f"MASTER_PORT must be a port from 1 to 65535, got {port!r}", field="MASTER_PORT"
        )
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return str(parse_peer(str(Address(bare, int(port))), field="MASTER_ADDR"))
    except ConfigError:
        raise ConfigError(
            f"MASTER_ADDR must be a host name or an address, got {host!r}", field="MASTER_ADDR"
        ) from None
