"""Output of the commands: tables, JSON, colored log prefixes."""

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

_LONG_STEP_S = 2.0  # a longer step is shown
_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")
_ROUTINE = re.compile(
    r"[0-9:.]{12} (debug|info) "
)  # the beginning of a line of `runtime.observe.log.human_line`
_ROUTINE_LEVELS = ("debug", "info")
_TIMING_TEXTS = {
    "router_queue_s": "queued in the router",
    "prefill_queue_s": "queued for prefill",
    "prefill_s": "prefill, first chunk to first token",
    "reserve_s": "reserving decode memory (during prefill)",
    "transfer_exposed_s": "KV transfer time not overlapped with prefill",
    "decode_queue_s": "queued for decode",
    "decode_s": "decode, first step to last token",
    "total_s": "total, as the router saw it",
}


def event_json(event: Event) -> str:
    """Return one line of JSON; "event" is its kind."""
    return json.dumps({"event": type(event).__name__.lower(), **asdict(event)})


def timings_table(completion: Completion, *, ttft_s: float) -> Table:
    """Return a table of the time of one request. `ttft_s` is the client's own measurement."""
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
_LEGEND = (
    "runs, queued: requests; pages: KV cache, slots: recurrent states (free/all)\n"
    "open: sessions of handoffs"
)


def status_view(status: ClusterStatus, rates: Mapping[str, float] | None = None) -> Group:
    """Return one row per pool with its stages, and below how requests were placed on workers of
    both roles, the units, and the reasons why pools do not serve.

    The view fits in 80 columns. `rates`: known tokens per second by address, of prompts in prefill
    and of output in decode.
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
    return Group(table, *_placed(status), Text(_LEGEND, "dim"), *reasons)


def _placed(status: ClusterStatus) -> list[Text]:
    """Return a line with the decisions about requests, if there was anything to decide."""
    if all(each.why == "roles" for each in status.placements):
        return []
    kinds = {each.kind: each for each in status.placements}
    texts = []
    for kind in kinds:
        found = [each for each in status.placements if each.kind == kind]
        reasons = ", ".join(f"{each.why} {each.requests}" for each in found)
        texts.append(f"{sum(each.requests for each in found)} {kind} ({reasons})")
    return [Text("placed: " + "; ".join(texts))]


def wide_enough() -> Console:
    """Return a console that wraps tables wider than the terminal instead of cutting them."""
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
    """Return the layers of each stage, the number of ranks, and the state of each data rank."""
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
    """Return a bar of the used share."""
    taken = -(-_BAR_CELLS * (total - free) // total) if total else 0
    return "█" * taken + "░" * (_BAR_CELLS - taken)


def log_printer(console: Console) -> LogSink:
    """Return a sink that prints each line after its process's name, in a color per process."""
    colors: dict[str, str] = {}

    def sink(name: str, line: str) -> None:
        color = colors.setdefault(name, _COLORS[len(colors) % len(_COLORS)])
        console.print(Text.assemble((f"{name:<12}", color), "│ ", line), soft_wrap=True)

    return sink


def json_printer(stream: TextIO) -> LogSink:
    """Return a sink that prints each line as a JSON object with the name of its process.

    Output that bypassed the logger becomes the message of a warning.
    """

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
    """Sink that shows only warnings and errors at startup, and every line from `ready` on.

    Lines of the name `own` are always shown.
    """

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
    """Sink that shows a cluster's lines in the background, until muted."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_muted = False

    def __call__(self, name: str, line: str) -> None:
        if not self._is_muted:
            self._console.print(Text(f"  {name}: {line}", "dim"), soft_wrap=True)

    def mute(self) -> None:
        """Drop all further lines, such as those of processes that are being stopped."""
        self._is_muted = True
