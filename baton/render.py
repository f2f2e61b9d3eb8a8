"""What the commands draw: tables for people, JSON for programs, coloured log prefixes."""

import json
from dataclasses import asdict, fields

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.process import LogSink
from baton.values import ClusterStatus, Completion, Event, Timings

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")
_TIMING_TEXTS = {
    "router_queue_s": "held back by the router",
    "prefill_queue_s": "queued for prefill",
    "prefill_s": "prefill, first chunk to first token",
    "reserve_s": "reserving decode memory (beside prefill)",
    "transfer_exposed_s": "handoff not hidden by prefill",
    "decode_queue_s": "queued for decode",
    "decode_s": "decode, first step to last token",
    "total_s": "total, as the router saw it",
}


def event_json(event: Event) -> str:
    """One line of JSON; "event" says which kind."""
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


def status_table(status: ClusterStatus) -> Table:
    """One row per pool."""
    title = f"model {status.model}: {status.running_requests} running, {status.waiting_requests} waiting at the router"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("role", "address", "state", "layers"):
        table.add_column(heading, no_wrap=heading == "address")
    for heading in ("queued", "runs", "pages\nfree", "slots\nfree", "open"):
        table.add_column(heading, justify="right")
    for worker in status.workers:
        state = Text("serving", "green") if worker.serving else Text(worker.reason or "not serving", "red")
        table.add_row(
            worker.role, worker.address, state, " ".join(worker.stages), str(worker.queued_requests),
            str(worker.running_requests), f"{worker.pages_free}/{worker.pages_total}",
            f"{worker.slots_free}/{worker.slots_total}", str(worker.open_sessions))
    return table


def log_printer(console: Console) -> LogSink:
    """Prints a process's lines behind its name, each process in a colour of its own."""
    colours: dict[str, str] = {}

    def sink(name: str, line: str) -> None:
        colour = colours.setdefault(name, _COLOURS[len(colours) % len(_COLOURS)])
        console.print(Text.assemble((f"{name:<12}", colour), "│ ", line), soft_wrap=True)

    return sink


class QuietPrinter:
    """The cluster's lines in the background of something else, until they are of no interest any more."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_muted = False

    def __call__(self, name: str, line: str) -> None:
        if not self._is_muted:
            self._console.print(Text(f"  {name}: {line}", "dim"), soft_wrap=True)

    def mute(self) -> None:
        """What processes say while they are being stopped is no news."""
        self._is_muted = True
