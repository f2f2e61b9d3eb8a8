"""Structured logs.

The process entry point configures them once; every other module uses `logging.getLogger(__name__)`.

    configure(level="info", style=LogStyle.HUMAN, role="router")
    with bind(request_id=..., session_id=...): ...      ids on every line logged inside, also across awaits;
                                                         so are trace_id and span_id of a traced call
    logger.info("prefill started", extra={"queue_s": 0.02})      extra fields become JSON keys or key=value
    report_end("router: no such folder: x")                      why a process ends, in the style of its logs

Values may come from unknown callers, so no logged value is trusted. Every value, message and
traceback line is truncated, and unprintable characters are escaped. One record is one line; only a
traceback has more lines, which are indented, so that no value can imitate a record.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import TextIO

from runtime.errors import ConfigError
from runtime.observe.tracing import trace_ids

LEVELS = ("debug", "info", "warning", "error")
MAX_VALUE_CHARACTERS = 256
MAX_MESSAGE_CHARACTERS = 4096
# Number of first and last lines, and characters of each line.
MAX_TRACEBACK_LINES = 256
MAX_TRACEBACK_CHARACTERS = 512
REFUSALS_AT_ONCE = 100
REFUSALS_PER_S = 20.0
# Module that logs failed calls, with one of three templates.
_REFUSALS = "runtime.rpc.calls"
_QUOTED = frozenset(' "=')
_PLAIN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "ids",
    "role",
}
_ids: ContextVar[Mapping[str, str]] = ContextVar("log_ids", default={})  # noqa: B039 (never mutated)


class LogStyle(StrEnum):
    """Format of log lines: for people, or one JSON object per line."""

    HUMAN = "human"
    JSON = "json"


def bound_ids() -> Mapping[str, str]:
    """Return the ids of the request that this task works for."""
    return _ids.get()


@contextmanager
def bind(**ids: str) -> Iterator[None]:
    """Add ids to every line logged inside the block."""
    token = _ids.set({**_ids.get(), **_shortened(ids)})
    try:
        yield
    finally:
        _ids.reset(token)


def rebind(**ids: str) -> None:
    """Add ids to every further line of this task.

    For handlers that get the id with their first message.
    """
    _ids.set({**_ids.get(), **_shortened(ids)})


def _shortened(ids: Mapping[str, str]) -> dict[str, str]:
    """Return the ids truncated, because each is kept as long as its task runs."""
    return {name: value[:MAX_VALUE_CHARACTERS] for name, value in ids.items()}


def shown(value: object, limit: int = MAX_VALUE_CHARACTERS) -> str:
    """Return `value` as one line of text, with at most `limit` characters and the original length.

    Unprintable characters are escaped as in a Python string.
    """
    text = value if isinstance(value, str) else str(value)
    head = text[:limit]
    if not head.isprintable():
        head = "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode()
            for character in head
        )
    return head if len(text) <= limit else f"{head}... ({len(text)} characters)"


class _ContextFilter(logging.Filter):
    """Filter that adds role and ids to new records, so that formatters need no context."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = self._role
        record.ids = {**_ids.get(), **trace_ids()}
        return True


class _RefusalLimit(logging.Filter):
    """Limit on log lines about failed calls, of which unknown callers could cause any number.

    `REFUSALS_AT_ONCE` lines of one template pass at once, then `REFUSALS_PER_S` per second. The
    next line that passes has the number of dropped lines as `omitted`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._used: dict[str, tuple[float, float]] = {}  # by template: (lines, time of that count)
        self._omitted: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != _REFUSALS:
            return True
        template = str(record.msg)
        now_s = time.monotonic()
        used, at_s = self._used.get(template, (0.0, now_s))
        used = max(0.0, used - (now_s - at_s) * REFUSALS_PER_S)
        if used + 1 > REFUSALS_AT_ONCE:
            self._omitted[template] += 1
            return False
        self._used[template] = used + 1, now_s
        if omitted := self._omitted.pop(template, 0):
            record.omitted = omitted
        return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    values = vars(record)
    extra = {key: value for key, value in values.items() if key not in _PLAIN_FIELDS}
    return {key: _plain(value) for key, value in {**values["ids"], **extra}.items()}


def _plain(value: object) -> object:
    """Return numbers unchanged and anything else as a short text."""
    return value if value is None or isinstance(value, bool | int | float) else shown(value)


def _message(record: logging.LogRecord) -> str:
    """Return the message with its arguments truncated and escaped before formatting.

    So a long argument does not hide the others.
    """
    arguments = record.args
    message = record.msg
    try:
        if isinstance(arguments, Mapping):
            message = str(message) % {key: _plain(value) for key, value in arguments.items()}
        elif arguments:
            message = str(message) % tuple(map(_plain, arguments))
    except (TypeError, ValueError, KeyError):  # a template that formats the object itself
        message = record.getMessage()
    return shown(message, MAX_MESSAGE_CHARACTERS)


def _traceback(formatted: str) -> list[str]:
    lines = formatted.splitlines()
    if (more := len(lines) - MAX_TRACEBACK_LINES) > 0:
        half = MAX_TRACEBACK_LINES // 2
        lines = [*lines[:half], f"... {more} lines ...", *lines[-half:]]
    return [f"    {shown(line, MAX_TRACEBACK_CHARACTERS)}" for line in lines]


def _utc(at_s: float) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))
    return f"{stamp}.{int(at_s % 1 * 1e6):06d}Z"


class JsonFormatter(logging.Formatter):
    """One JSON object per line, time in UTC with microseconds."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "role": vars(record)["role"],
            "logger": record.name,
            "message": _message(record),
        }
        line.update((key, value) for key, value in _fields(record).items() if key not in line)
        if record.exc_info:
            line["exception"] = "\n".join(_traceback(self.formatException(record.exc_info)))
        return json.dumps(line)


def human_line(text: str, *, level: str = "info", at_s: float | None = None) -> str:
    """Return a log line for people: time, level, text.

    Programs without a logger use it too. `at_s` is seconds since 1970, now if None.
    """
    at_s = time.time() if at_s is None else at_s
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))}.{int(at_s % 1 * 1e3):03d} {level:7} {text}"


def styled_line(style: LogStyle, text: str, *, role: str, level: str = "info") -> str:
    """Return a line with the current time in the style of the logs, for programs without a logger."""
    if style is LogStyle.HUMAN:
        return human_line(text, level=level)
    return json.dumps({"time": _utc(time.time()), "level": level, "role": role, "message": text})


def message_of(line: str) -> str:
    """Return the message of a JSON log line; any other line is returned unchanged."""
    try:
        values = json.loads(line)
    except ValueError:
        return line
    message = values.get("message") if isinstance(values, dict) else None
    return message if isinstance(message, str) else line


class HumanFormatter(logging.Formatter):
    """Time, level, message, key=value; values with spaces, quotes or = are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={_quoted(value)}" for key, value in _fields(record).items())
        line = human_line(_message(record), level=record.levelname.lower(), at_s=record.created)
        line += f"  {fields}" if fields else ""
        return (
            "\n".join([line, *_traceback(self.formatException(record.exc_info))])
            if record.exc_info
            else line
        )


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if _QUOTED.intersection(text) else text


# At level debug these libraries log every call, or every compiled instruction; httpx2 logs every
# request at level info.
_TALKATIVE = {"grpc": logging.INFO, "numba": logging.INFO, "httpx2": logging.WARNING}
# This logger writes every metadata value that is not UTF-8 in full, with a traceback, each time it
# is read. That exposes a token with a stray byte, or turns 2 KB from an unknown caller into 300 KB
# of log. `runtime.rpc.calls` logs the errors of handlers instead.
_QUOTING = ("grpc._cython.cygrpc",)


def configure(*, level: str, style: LogStyle, role: str, stream: TextIO = sys.stderr) -> None:
    """Send all logs of this process to `stream`. Raises ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(
            f"log level must be one of {', '.join(LEVELS)}, got {level!r}", field="log_level"
        )
    handler = logging.StreamHandler(stream)
    handler.addFilter(_RefusalLimit())
    handler.addFilter(_ContextFilter(role))
    handler.setFormatter(JsonFormatter() if style is LogStyle.JSON else HumanFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    for library, least in _TALKATIVE.items():
        logging.getLogger(library).setLevel(max(least, logging.getLogger().level))
    for library in _QUOTING:
        logging.getLogger(library).setLevel(logging.CRITICAL)


def report_end(text: str) -> None:
    """Write the reason why this process ends to stderr, in JSON if the logs are JSON, else as text."""
    if any(
        isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers
    ):
        logging.getLogger(__name__).error(text)
    else:
        print(text, file=sys.stderr)
