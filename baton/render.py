"""What the commands draw: tables for people, JSON for programs, colored log prefixes."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from baton.process import LogSink
from baton.values import ClusterStatus, Completion, Event, Timings, WorkerStatus
from runtime.observe.log import LogStyle, styled_line

_LONG_STEP_S = 2.0  # a step that takes longer is worth a word
_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")
_ROUTINE = re.compile(
    r"[0-9:.]{12} (debug|info) "
)  # as `runtime.observe.log.human_line` begins a line
_ROUTINE_LEVELS = ("debug", "info")
_TIMING_TEXTS = {
    "router_queue_s": "held back by the router",
    "prefill_queue_s": "queued for prefill",
    "prefill_s": "prefill, first chunk to first token",
    "reserve_s": "reserving decode memory (beside prefill)",
    "transfer_exposed_s": "KV transfer time not overlapped with prefill",
    "decode_queue_s": "queued for decode",
    "decode_s": "decode, first step to last token",
    "total_s": "total, as the router saw it",
}


def event_json(event: Event) -> str:
    """One line of JSON; "event" is its kind."""
    return json.dumps({"event": type(event).__name__.lower(), **asdict(event)})


def timings_table(completion: Completion, *, ttft_s: float) -> Table:
    """Where the time of one request went. `ttft_s` is the client's own measurement."""
    usage = completion.finish.usage
    title = f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_row("time to first token, as the client saw it", _ms(ttft_s))
    for name, seconds in _present(completion.finish.timings):
        table.add_row(_TIMING_TEXTS[name], _ms(seconds))
    return table


def _present(timings: Timings) -> list[tuple[str, float]]:
    values = ((f.name, getattr(timings, f.name)) for f in fields(timings))
    return [(name, seconds) for name, seconds in values if seconds is not None]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


LEAST_COLUMNS = 64  # of the tables
_BAR_CELLS = 9
_LONGEST_COUNT = 99_999


def status_view(status: ClusterStatus, rates: Mapping[str, float] | None = None) -> Group:
    """One row per pool, its stages drawn below its address, and below all why pools do not serve.
    Fits in 80 columns.

    `rates`: tokens per second by address, where they are known; of prompts in prefill, of output in
    decode.
    """
    title = f"model {status.model}: {status.running_requests} running, {status.waiting_requests} waiting at the router"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in ("role", "address", "state"):
        table.add_column(heading, overflow="fold")
    rate_heading = () if rates is None else ("tokens\n/s",)
    for heading in ("runs", "queued", "pages\nfree", "slots\nfree", "open", *rate_heading):
        table.add_column(heading, justify="right")
    for worker in status.workers:
        cells: list[str | Text] = [
            worker.role,
            Text(f"{worker.address}\n{_picture(worker)}"),
            _state(worker),
            str(worker.running_requests),
            str(worker.queued_requests),
            f"{_free(worker.pages_free, worker.pages_total)}\n{_bar(worker.pages_free, worker.pages_total)}",
            _free(worker.slots_free, worker.slots_total),
            str(worker.open_sessions),
        ]
        table.add_row(
            *cells, *(() if rates is None else (f"{rates.get(worker.address, 0.0):.0f}",))
        )
    reasons = [
        Text(f"{worker.role} {worker.address}: {worker.reason or 'not serving'}", "red")
        for worker in status.workers
        if not worker.serving
    ]
    return Group(table, *reasons)


def wide_enough() -> Console:
    """Return a console for tables: in a terminal narrower than they are, its lines run over and
    nothing is cut."""
    console = Console(highlight=False)
    return (
        console if console.width >= LEAST_COLUMNS else Console(highlight=False, width=LEAST_COLUMNS)
    )


def _state(worker: WorkerStatus) -> Text:
    if not worker.serving:
        return Text("down", "red")
    if worker.busy_s >= _LONG_STEP_S:
        return Text(f"{worker.busy_s:.0f} s\nin step", "yellow")
    return Text("serving", "green")


def _picture(worker: WorkerStatus) -> str:
    """The layers of each stage, from the first to the last, how many ranks share each, and what
    each data rank does."""
    stages = (
        "├" + "┼".join(f" {layers} " for layers in worker.stages) + "┤" if worker.stages else ""
    )
    picture = f"{stages} x {worker.tensor_size} ranks" if worker.tensor_size > 1 else stages
    for number, rank in enumerate(worker.data_ranks):
        picture += f"\ndata {number}: {rank.running_requests} run, {rank.pages_free} pages free"
    return picture


def _free(free: int, total: int) -> str:
    return f"{free}/{total}" if total <= _LONGEST_COUNT else f"{100 * free // total} %"


def _bar(free: int, total: int) -> str:
    """How much is taken."""
    taken = -(-_BAR_CELLS * (total - free) // total) if total else 0
    return "█" * taken + "░" * (_BAR_CELLS - taken)


def log_printer(console: Console) -> LogSink:
    """Prints a process's lines behind its name, each process in a color of its own."""
    colors: dict[str, str] = {}

    def sink(name: str, line: str) -> None:
        color = colors.setdefault(name, _COLORS[len(colors) % len(_COLORS)])
        console.print(Text.assemble((f"{name:<12}", color), "│ ", line), soft_wrap=True)

    return sink


def json_printer(stream: TextIO) -> LogSink:
    """Print each line as a JSON object with the name of its process. What a process wrote past its
    logger becomes the message of a warning."""

    def sink(name: str, line: str) -> None:
        if not line:
            return
        values = _object(line) or _object(
            styled_line(LogStyle.JSON, line, role=name, level="warning")
        )
        print(json.dumps({"process": name, **values}), file=stream, flush=True)

    return sink


def _object(line: str) -> dict[str, object]:
    """Return the JSON object in a line, or an empty one."""
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _is_routine(line: str) -> bool:
    return (
        bool(_ROUTINE.match(line)) or str(_object(line).get("level", "")).lower() in _ROUTINE_LEVELS
    )


class StartPrinter:
    """Of what processes write while they start, only what is worth attention; from `ready` on all
    of it. `own` is the name whose lines always are."""

    def __init__(self, sink: LogSink, *, own: str) -> None:
        self._sink = sink
        self._own = own
        self._is_ready = False

    def __call__(self, name: str, line: str) -> None:
        if self._is_ready or name == self._own or not _is_routine(line):
            self._sink(name, line)

    def ready(self) -> None:
        self._is_ready = True


class QuietPrinter:
    """The cluster's lines in the background of something else, until they are of no interest any
    more."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_muted = False

    def __call__(self, name: str, line: str) -> None:
        if not self._is_muted:
            self._console.print(Text(f"  {name}: {line}", "dim"), soft_wrap=True)

    def mute(self) -> None:
        """What processes write while they are being stopped is left out."""
        self._is_muted = True
