"""Structured logs. Configured once, at the process edge; every other module uses `logging.getLogger(__name__)`.

    configure(level="info", style=LogStyle.HUMAN, role="router")
    with bind(request_id=..., session_id=...): ...      ids on every line logged inside, also across awaits
    logger.info("prefill started", extra={"queue_s": 0.02})      extra fields become JSON keys or key=value
"""

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import TextIO

from runtime.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
_PLAIN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "ids", "role"}
_ids: ContextVar[Mapping[str, str]] = ContextVar("log_ids", default={})  # noqa: B039 (never mutated)


class LogStyle(StrEnum):
    HUMAN = "human"
    JSON = "json"


def bound_ids() -> Mapping[str, str]:
    """The ids of the request this task works for."""
    return _ids.get()


@contextmanager
def bind(**ids: str) -> Iterator[None]:
    """Put ids on every line logged inside."""
    token = _ids.set({**_ids.get(), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def rebind(**ids: str) -> None:
    """Put ids on every further line of this task: for handlers that learn the id from their first message."""
    _ids.set({**_ids.get(), **ids})


class _Context(logging.Filter):
    """Stamps records where they are made, so that formatters need no context."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = self._role
        record.ids = _ids.get()
        return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    values = vars(record)
    extra = {key: value for key, value in values.items() if key not in _PLAIN_FIELDS}
    return {**values["ids"], **extra}


class JsonFormatter(logging.Formatter):
    """One JSON object per line, time in UTC with microseconds."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.created % 1 * 1e6):06d}Z",
            "level": record.levelname.lower(),
            "role": vars(record)["role"],
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def human_line(text: str, *, level: str = "info", at_s: float | None = None) -> str:
    """Time, level, text: how every line for people begins, those of programs without a logger, too. `at_s` is seconds
    since 1970, now if None."""
    at_s = time.time() if at_s is None else at_s
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))}.{int(at_s % 1 * 1e3):03d} {level:7} {text}"


class HumanFormatter(logging.Formatter):
    """Time, level, message, key=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = human_line(record.getMessage(), level=record.levelname.lower(), at_s=record.created)
        line += f"  {fields}" if fields else ""
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(*, level: str, style: LogStyle, role: str, stream: TextIO = sys.stderr) -> None:
    """Send all logs of this process to `stream`. Raises ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"log level must be one of {', '.join(LEVELS)}, got {level!r}", field="log_level")
    handler = logging.StreamHandler(stream)
    handler.addFilter(_Context(role))
    handler.setFormatter(JsonFormatter() if style is LogStyle.JSON else HumanFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
