"""Published traces of requests.

read_trace(Path("conversation_trace.jsonl"))             # Mooncake's, or lines of our own
read_trace(Path("AzureLLMInferenceTrace_conv.csv"), limit=1000)
read_trace(Path("BurstGPT_1.csv"), speed=2.0)
read_trace(Path("traces/"))                              # agents' conversations, a file each
"""

import csv
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton import agent_traces
from baton.workload import MAX_BLOCK, MAX_LENGTH, Planned, Turn
from runtime.errors import ConfigError


@dataclass(frozen=True)
class Trace:
    """Requests in order of time, the first at 0 s, and the number of failed requests left out.

    Without `is_timed` every conversation begins at 0 s, because the recording does not say when.
    """

    planned: tuple[Planned, ...]
    num_unanswered: int = 0
    is_timed: bool = True


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
    traces. Lines with the same `session_id` are a conversation: `delay` (ms) is the pause after the
    response before. A line, a file or each file of a folder can be an agent's conversation, as
    `baton.agent_traces` describes.

    Raises:
        ConfigError: the trace cannot be used; the message names the line.
    """
    try:
        trace = _read(path, limit)
    except OSError as error:
        raise ConfigError(
            f"cannot read the trace {path}: {error.strerror}", field="trace"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}", field="trace") from error
    if not trace.planned:
        raise ConfigError(f"the trace {path} has no requests", field="trace")
    start_s = trace.planned[0].at_s if trace.is_timed else 0.0
    return replace(trace, planned=tuple(_faster(item, start_s, speed) for item in trace.planned))


def _faster(item: Planned, start_s: float, speed: float) -> Planned:
    turn = item.turn and replace(item.turn, pause_s=item.turn.pause_s / speed)
    return replace(item, at_s=(item.at_s - start_s) / speed, turn=turn)


def _read(path: Path, limit: int | None) -> Trace:
    """Return the requests at their own times and pace, in order of time."""
    if path.is_dir() or path.suffix == ".json":
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        texts = ((str(file), file.read_bytes()) for file in files)
        return _taken(_conversations(texts), limit, is_timed=False)
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        header = next(csv.reader([first]), [])
        columns = next((known for known in (_AZURE, _BURST_GPT) if known.at in header), None)
        if columns is not None:
            return _in_order(_taken(_rows(file, path, columns), limit))
        lines = ((f"{path}:{number}", line) for number, line in enumerate(file, 1) if line.strip())
        if '"requests"' in first:
            return _taken(_conversations(lines), limit, is_timed=False)
        trace = _taken(_json_lines(lines), limit)
    if any(item.turn for item in trace.planned):
        return _in_order(trace)
    if any(after.at_s < before.at_s for before, after in itertools.pairwise(trace.planned)):
        raise ConfigError(f"the trace {path} is not in order of time", field="trace")
    return trace


def _in_order(trace: Trace) -> Trace:
    return replace(trace, planned=tuple(sorted(trace.planned, key=lambda item: item.at_s)))


def _taken(lines: Iterator[Planned | None], limit: int | None, *, is_timed: bool = True) -> Trace:
    planned = list[Planned]()
    num_unanswered = 0
    for item in lines:
        if item is None:
            num_unanswered += 1
        else:
            planned.append(item)
        if len(planned) == limit:
            break
    return Trace(tuple(planned), num_unanswered, is_timed)


def _conversations(texts: Iterable[tuple[str, str | bytes]]) -> Iterator[Planned | None]:
    """Yield the requests of agents' conversations; None for one without a response."""
    shared: agent_traces.BlockNumbers = defaultdict(itertools.count().__next__)
    for session, (where, text) in enumerate(texts):
        try:
            turns, num_unanswered = agent_traces.conversation(json.loads(text), session, shared)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ConfigError(
                f"{where}: needs requests with t, in, out and hash_ids ({error!r})", field="trace"
            ) from None
        yield from (_checked(item, where) for item in turns)
        yield from [None] * num_unanswered


def _json_lines(lines: Iterable[tuple[str, str]]) -> Iterator[Planned]:
    sessions: dict[str, Planned] = {}  # the latest turn of each
    for where, line in lines:
        try:
            values = json.loads(line)
            before = sessions.get(values["session_id"]) if "session_id" in values else None
            prompt, output = (
                int(values[ours] if ours in values else values[theirs])
                for ours, theirs in (
                    ("prompt_tokens", "input_length"),
                    ("output_tokens", "output_length"),
                )
            )
            blocks = tuple(map(int, values.get("hash_ids", ())))
            item = Planned(_at_s(values, before), prompt, output, blocks)
            if "session_id" in values:
                item = replace(item, turn=_turn(values, before, item.at_s, len(sessions)))
                sessions[values["session_id"]] = item
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"{where}: needs at_s, prompt_tokens and output_tokens ({error!r})", field="trace"
            ) from None
        if any(not 0 <= block <= MAX_BLOCK for block in blocks):
            raise ConfigError(f"{where}: hash_ids must be from 0 to {MAX_BLOCK}", field="trace")
        yield _checked(item, where)


def _at_s(values: Mapping[str, Any], before: Planned | None) -> float:
    """Return the time of a request; that of a later turn may follow from its delay."""
    if "at_s" in values:
        return float(values["at_s"])
    if before is not None and "timestamp" not in values:
        return before.at_s + float(values["delay"]) / 1e3
    return float(values["timestamp"]) / 1e3


def _turn(values: Mapping[str, Any], before: Planned | None, at_s: float, session: int) -> Turn:
    """Return the place of a request; `session` is the number of a conversation that it begins."""
    if before is None or before.turn is None:
        return Turn(session)
    pause_s = float(values["delay"]) / 1e3 if "delay" in values else at_s - before.at_s
    number = before.turn.number
    return Turn(before.turn.session, number + 1, (number,), pause_s)


def _rows(lines: Iterator[str], path: Path, columns: _Columns) -> Iterator[Planned | None]:
    """Yield the requests of a table; None for one without a response or a prompt."""
    rows = csv.DictReader(lines)
    for row in rows:
        where = f"{path}:{rows.line_num}"
        try:
            at_s = _time_s(row[columns.at])
            prompt = int(row[columns.prompt_tokens])
            output = int(row[columns.output_tokens])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
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
        and 0 <= (item.turn.pause_s if item.turn else 0.0) < math.inf
        and 1 <= item.prompt_tokens <= MAX_LENGTH
        and 1 <= item.output_tokens <= MAX_LENGTH
    ):
        raise ConfigError(
            f"{where}: times must be finite and not negative, lengths must be from 1 to {MAX_LENGTH}",
            field="trace",
        )
    return item
