"""Weights and quotas of clients, from a file that is read again when it changes.

["*"]                          # clients without a table of their own
requests_per_minute = 600

[alice]                        # a token's name, or a name in a certificate
weight = 4
generated_tokens_per_minute = 100_000
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError

from protos import types_pb2
from router.request.cache_hints import client_digest
from router.request.priorities import EVERYBODY
from runtime.clock import Clock
from runtime.config import Config
from runtime.errors import ConfigError
from runtime.security.access import Caller
from runtime.security.file_reload import Contents, Watched
from runtime.session_limits import MAX_WEIGHT, MIN_WEIGHT

OTHERS = "other"  # metric label of clients without a table
MAX_TABLES = 256
RELOAD_S = 1.0  # a look at the file costs as much as all sums of a request
_SETTING = "client_limits"


class ClientLimits(Config):
    """Limits of one client at one router; 0 means no limit."""

    weight: float = Field(
        default=1.0,
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        description="Share of the pools while others wait.",
    )
    requests_per_minute: int = Field(default=0, ge=0, le=1 << 40)
    prompt_tokens_per_minute: int = Field(default=0, ge=0, le=1 << 40)
    generated_tokens_per_minute: int = Field(default=0, ge=0, le=1 << 40)
    concurrent_requests: int = Field(default=0, ge=0, le=1 << 20)

    def share_of(self, client: str) -> types_pb2.ClientShare:
        """Return the share of a client with these limits, in the workers' terms."""
        return types_pb2.ClientShare(client=client_digest(client), weight=self.weight)


UNLIMITED = ClientLimits()


@dataclass(frozen=True)
class NamedLimits:
    """Limits with the name of their table, which is a metric label."""

    name: str = OTHERS
    limits: ClientLimits = UNLIMITED


@dataclass(frozen=True)
class ClientTables:
    """The tables of a file, in its order."""

    tables: Mapping[str, ClientLimits] = field(default_factory=dict)

    @classmethod
    def parse(cls, contents: Contents) -> Self:
        """Parse the file.

        Raises:
            ConfigError: it is not TOML, or a table is invalid; names the table and the key.
        """
        try:
            found = tomllib.loads(contents[_SETTING].decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{_SETTING}: the file is not TOML: {error}", field=_SETTING
            ) from None
        if len(found) > MAX_TABLES:
            raise ConfigError(
                f"{_SETTING}: the file has {len(found)} tables, the limit is {MAX_TABLES}",
                field=_SETTING,
            )
        return cls({name: _limits(name, table) for name, table in found.items()})

    def of(self, caller: Caller) -> NamedLimits:
        """Return the first table that names the caller, or that of everybody."""
        for name, limits in self.tables.items():
            if name in caller.names:
                return NamedLimits(name, limits)
        return NamedLimits(OTHERS, self.tables.get(EVERYBODY, UNLIMITED))


def _limits(name: str, table: object) -> ClientLimits:
    try:
        return ClientLimits.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, (name, *first["loc"])))
        raise ConfigError(f"{_SETTING}: {key}: {first['msg']}", field=_SETTING) from None


class LimitsFile:
    """The tables of a file; a changed file is read again within `RELOAD_S`."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Read the file.

        Raises:
            ConfigError: the file cannot be read or is invalid.
        """
        self._watched = Watched({_SETTING: path}, ClientTables.parse)
        self._clock = clock
        self._tables = self._watched.current()
        self._looked_s = clock.now()

    def of(self, caller: Caller) -> NamedLimits:
        """Return the limits of a caller. A file that became invalid changes nothing."""
        now_s = self._clock.now()
        if now_s - self._looked_s >= RELOAD_S:
            self._looked_s = now_s
            self._tables = self._watched.current()
        return self._tables.of(caller)
