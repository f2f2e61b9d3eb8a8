"""`baton status --watch`: the state of the cluster, refreshed every second."""

import contextlib
import json
import time
from dataclasses import asdict, dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from baton.client import BatonClient
from baton.render import status_view
from baton.values import ClusterStatus, WorkerStatus
from runtime.errors import BatonError

INTERVAL_S = 1.0


@dataclass(frozen=True)
class StatusSample:
    """Cluster status with its time in seconds of a monotonic clock."""

    status: ClusterStatus
    taken_s: float


def token_rates(before: StatusSample, now: StatusSample) -> dict[str, float]:
    """Return tokens per second by address: of prompts in prefill pools, of output in decode pools.

    A worker that is new or has restarted has no rate yet.
    """
    known = {worker.address: worker for worker in before.status.workers}
    elapsed_s = max(now.taken_s - before.taken_s, 1e-3)
    rates = {}
    for worker in now.status.workers:
        earlier = known.get(worker.address)
        if earlier is not None and earlier.incarnation == worker.incarnation:
            rates[worker.address] = max(0, _tokens(worker) - _tokens(earlier)) / elapsed_s
    return rates


def _tokens(worker: WorkerStatus) -> int:
    return worker.prompt_tokens if worker.role == "prefill" else worker.output_tokens


def watch_status(client: BatonClient, console: Console) -> None:
    """Show the status until Ctrl-C; show an unreachable router as such, and call it again."""
    before: StatusSample | None = None
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, screen=console.is_terminal) as live,
    ):
        while True:
            try:
                now = StatusSample(client.cluster_status(), time.monotonic())
            except BatonError as error:
                shown: RenderableType = Text(str(error), "red")
            else:
                shown = status_view(now.status, {} if before is None else token_rates(before, now))
                before = now
            if console.is_terminal:
                live.update(Group(shown, Text("Ctrl-C ends", "dim")), refresh=True)
            else:
                console.print(shown)
            time.sleep(INTERVAL_S)


def watch_json(client: BatonClient) -> None:
    """Print the status as one line of JSON per refresh, until Ctrl-C.

    Raises:
        BatonError: the router cannot be reached.
    """
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            print(json.dumps(asdict(client.cluster_status())), flush=True)
            time.sleep(INTERVAL_S)
