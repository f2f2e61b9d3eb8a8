"""Structured logs. Configured once, at the process edge; every other module uses
`logging.getLogger(__name__)`.

    configure(level="info", style=LogStyle.HUMAN, role="router")
    with bind(request_id=..., session_id=...): ...      ids on every line logged inside, also across awaits
    logger.info("prefill started", extra={"queue_s": 0.02})      extra fields become JSON keys or key=value
    report_end("router: no such folder: x")                      why a process ends, in the style of its logs

Values may come from unknown callers, so nothing that is logged is trusted: every value, message and
line of a traceback is cut to a stated length, and what is not printable is escaped. One record is
one line; only a traceback has more, and these are indented, so that no value can look like a record
of its own.
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

LEVELS = ("debug", "info", "warning", "error")
MAX_VALUE_CHARACTERS, MAX_MESSAGE_CHARACTERS = 256, 4096
MAX_TRACEBACK_LINES, MAX_TRACEBACK_CHARACTERS = (
    256,
    512,
)  # the first and the last lines; of each line
REFUSALS_AT_ONCE, REFUSALS_PER_S = 100, 20.0
_REFUSALS = "runtime.rpc.calls"  # the module that logs failed calls, by one of three templates
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
    """For people, or one JSON object per line."""

    HUMAN = "human"
    JSON = "json"


def bound_ids() -> Mapping[str, str]:
    """The ids of the request this task works for."""
    return _ids.get()


@contextmanager
def bind(**ids: str) -> Iterator[None]:
    """Put ids on every line logged inside."""
    token = _ids.set({**_ids.get(), **_shortened(ids)})
    try:
        yield
    finally:
        _ids.reset(token)


def rebind(**ids: str) -> None:
    """Put ids on every further line of this task: for handlers that get the id with their first
    message."""
    _ids.set({**_ids.get(), **_shortened(ids)})


def _shortened(ids: Mapping[str, str]) -> dict[str, str]:
    """An id is kept as long as its task runs: not one of eight megabytes."""
    return {name: value[:MAX_VALUE_CHARACTERS] for name, value in ids.items()}


def shown(value: object, limit: int = MAX_VALUE_CHARACTERS) -> str:
    """`value` as a text of one line: at most `limit` characters, then how many there were; what is
    not printable is escaped as in a Python string."""
    text = value if isinstance(value, str) else str(value)
    head = text[:limit]
    if not head.isprintable():
        head = "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode()
            for character in head
        )
    return head if len(text) <= limit else f"{head}... ({len(text)} characters)"


class _Context(logging.Filter):
    """Stamps records where they are made, so that formatters need no context."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = self._role
        record.ids = _ids.get()
        return True


class _RefusalLimit(logging.Filter):
    """A bound on the lines about calls that failed: unknown callers send more of them than any log
    takes. `REFUSALS_AT_ONCE` lines of one template pass at once and `REFUSALS_PER_S` a second after
    that. The next line that passes has their number as `omitted`."""

    def __init__(self) -> None:
        super().__init__()
        self._used: dict[str, tuple[float, float]] = {}  # lines, as of when
        self._omitted: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != _REFUSALS:
            return True
        template, now_s = str(record.msg), time.monotonic()
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
    """Numbers stay numbers, everything else becomes a short text."""
    return value if value is None or isinstance(value, bool | int | float) else shown(value)


def _message(record: logging.LogRecord) -> str:
    """The template with its arguments cut and escaped before they are put in, so that a long one
    hides no other."""
    arguments, message = record.args, record.msg
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
    """Time, level, text: how every line for people begins, those of programs without a logger, too.
    `at_s` is seconds since 1970, now if None."""
    at_s = time.time() if at_s is None else at_s
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))}.{int(at_s % 1 * 1e3):03d} {level:7} {text}"


def styled_line(style: LogStyle, text: str, *, role: str, level: str = "info") -> str:
    """Return a line of now in the style of the logs, for programs without a logger."""
    if style is LogStyle.HUMAN:
        return human_line(text, level=level)
    return json.dumps({"time": _utc(time.time()), "level": level, "role": role, "message": text})


def message_of(line: str) -> str:
    """Return the message of a line in JSON, and any other line as it is."""
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


# At level debug they have a line for each call, or for each instruction that is compiled.
_TALKATIVE = ("grpc", "numba")
# Logs every metadata value that is not UTF-8 whole, each time it is read and with a traceback: a
# token with a stray byte, or 300 KB of log for 2 KB from an unknown caller. Errors of handlers are
# logged by `runtime.rpc.calls`, not there.
_QUOTING = ("grpc._cython.cygrpc",)


def configure(*, level: str, style: LogStyle, role: str, stream: TextIO = sys.stderr) -> None:
    """Send all logs of this process to `stream`. Raises ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(
            f"log level must be one of {', '.join(LEVELS)}, got {level!r}", field="log_level"
        )
    handler = logging.StreamHandler(stream)
    handler.addFilter(_RefusalLimit())
    handler.addFilter(_Context(role))
    handler.setFormatter(JsonFormatter() if style is LogStyle.JSON else HumanFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(max(logging.INFO, logging.getLogger().level))
    for library in _QUOTING:
        logging.getLogger(library).setLevel(logging.CRITICAL)


def report_end(text: str) -> None:
    """Write why this process ends to stderr: a JSON line where logs are JSON, else the bare
    text."""
    if any(
        isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers
    ):
        logging.getLogger(__name__).error(text)
    else:
        print(text, file=sys.stderr)
