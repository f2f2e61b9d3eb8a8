"""Published traces of requests.

read_trace(Path("conversation_trace.jsonl"))             # Mooncake's, or lines of our own
read_trace(Path("AzureLLMInferenceTrace_conv.csv"), limit=1000)
read_trace(Path("BurstGPT_1.csv"), speed=2.0)
"""

import csv
import itertools
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from baton.workload import MAX_BLOCK, MAX_LENGTH, Planned
from runtime.errors import ConfigError


@dataclass(frozen=True)
class Trace:
    """Requests in order of time, the first at 0 s, and the number of failed requests left out."""

    planned: tuple[Planned, ...]
    num_unanswered: int = 0


@dataclass(frozen=True)
class _Columns:
    """Column names of a published table; its times are dates, or seconds."""

    at: str
    prompt_tokens: str
    output_tokens: str


_AZURE = _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST_GPT = _Columns("Timestamp", "Request tokens", "Response tokens")


def read_trace(path: Path, *, speed: float = 1.0, limit: int | None = None) -> Trace:
    """Read a trace, or its first `limit` requests. `speed` 2 replays it twice as fast.

    A file whose first line is the header of Azure's or BurstGPT's tables is read as such. Any other
    file has a JSON object per line, in order of time: `at_s`, `prompt_tokens`, `output_tokens`; or
    `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, as in Mooncake's published
    traces.

    Raises:
        ConfigError: the trace cannot be used; the message names the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader([file.readline()]), [])
            file.seek(0)
            columns = next((known for known in (_AZURE, _BURST_GPT) if known.at in header), None)
            lines = _json_lines(file, path) if columns is None else _rows(file, path, columns)
            trace = _taken(lines, limit)
    except OSError as error:
        raise ConfigError(
            f"cannot read the trace {path}: {error.strerror}", field="trace"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}", field="trace") from error
    planned = (
        trace.planned if columns is None else sorted(trace.planned, key=lambda item: item.at_s)
    )
    if not planned:
        raise ConfigError(f"the trace {path} has no requests", field="trace")
    if any(after.at_s < before.at_s for before, after in itertools.pairwise(planned)):
        raise ConfigError(f"the trace {path} is not in order of time", field="trace")
    start_s = planned[0].at_s
    return replace(
        trace, planned=tuple(replace(item, at_s=(item.at_s - start_s) / speed) for item in planned)
    )


def _taken(lines: Iterator[Planned | None], limit: int | None) -> Trace:
    planned = list[Planned]()
    num_unanswered = 0
    for item in lines:
        if item is None:
            num_unanswered += 1
        else:
            planned.append(item)
        if len(planned) == limit:
            break
    return Trace(tuple(planned), num_unanswered)


def _json_lines(lines: Iterator[str], path: Path) -> Iterator[Planned]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            values = json.loads(line)
            at_s = float(values["at_s"]) if "at_s" in values else float(values["timestamp"]) / 1e3
            prompt, output = (
                int(values[ours] if ours in values else values[theirs])
                for ours, theirs in (
                    ("prompt_tokens", "input_length"),
                    ("output_tokens", "output_length"),
                )
            )
            blocks = tuple(map(int, values.get("hash_ids", ())))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{where}: needs at_s, prompt_tokens and output_tokens ({error!r})", field="trace"
            ) from None
        if any(not 0 <= block <= MAX_BLOCK for block in blocks):
            raise ConfigError(f"{where}: hash_ids must be from 0 to {MAX_BLOCK}", field="trace")
        yield _checked(Planned(at_s, prompt, output, blocks), where)


def _rows(lines: Iterator[str], path: Path, columns: _Columns) -> Iterator[Planned | None]:
    """Yield the requests of a table; None for one without a response or a prompt."""
    rows = csv.DictReader(lines)
    for row in rows:
        where = f"{path}:{rows.line_num}"
        try:
            at_s = _time_s(row[columns.at])
            prompt = int(row[columns.prompt_tokens])
            output = int(row[columns.output_tokens])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{where}: needs {columns.at}, {columns.prompt_tokens} and {columns.output_tokens} "
                f"({error!r})",
                field="trace",
            ) from None
        yield _checked(Planned(at_s, prompt, output), where) if prompt and output else None


def _time_s(text: str) -> float:
    """Return the seconds of a number or a date, or raise ValueError for other text."""
    with suppress(ValueError):
        return float(text)
    date = datetime.fromisoformat(text)
    return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()


def _checked(item: Planned, where: str) -> Planned:
    if not (
        0 <= item.at_s < math.inf
        and 1 <= item.prompt_tokens <= MAX_LENGTH
        and 1 <= item.output_tokens <= MAX_LENGTH
    ):
        raise ConfigError(
            f"{where}: times must be finite and not negative, lengths must be from 1 to {MAX_LENGTH}",
            field="trace",
        )
    return item
