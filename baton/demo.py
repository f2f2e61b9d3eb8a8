"""`baton demo`: one question to a whole cluster, with the included model."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig, demo_model
from baton.fork_server import ForkServer
from baton.gguf_models import local_checkpoint
from baton.packaged_models import PACKAGED
from baton.render import QuietPrinter, StartPrinter, status_view, timings_table
from baton.values import ChatMessage, Chunk, ClusterStatus, Event, Query, Sampling, Stop
from baton.wire import completion_of
from runtime.errors import ConfigError, InternalError

# The demo model was trained to state facts of a short story at its end.
ANSWER = "Near the library Ivan hid a red notebook."
STORY = (
    f"Near the old mill Mona found a golden lantern. {ANSWER} Near the harbor Sam painted a blue teapot. "
    "Near the market Tara sold a white kettle. Near the school Hana counted a purple saddle."
)
QUESTION = "What did Ivan do?"
ANSWER_TIMEOUT_S = 60.0
REST_TIMEOUT_S = 3.0
REPORT_S = 0.1  # workers report four times a second


@dataclass(frozen=True)
class DemoTask:
    """A question to a model, and what its response must contain."""

    model: Path
    prompt: str
    question: str
    answer: str
    is_whole: bool  # whether the answer must be the whole response

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the task of the included model, or of a packaged one.

        Raises:
            ConfigError: there is no such model, or its package is not installed.
        """
        if not name:
            return cls(demo_model(), f"{STORY} {QUESTION}", QUESTION, ANSWER, is_whole=True)
        if name not in PACKAGED:
            raise ConfigError(
                f"--model must be one of {', '.join(PACKAGED)}, got {name!r}; `baton serve` serves "
                "any model",
                field="model",
            )
        question = "What is the capital of France?"
        return cls(local_checkpoint(Path(name)), question, question, "Paris", is_whole=False)

    def check(self, text: str) -> None:
        """Raise InternalError if the response is wrong."""
        is_right = text.strip() == self.answer if self.is_whole else self.answer in text
        if not is_right:
            raise InternalError(
                f"the right answer is {self.answer!r}, the cluster returned {text.strip()!r}"
            )


async def run_demo(console: Console, fork_server: ForkServer | None, task: DemoTask) -> None:
    """Run one question through two clusters and show the timings.

    The first one has a router, a prefill worker and a decode pool of two stages, the second one a
    router and a worker of both roles. The workers are forks of `fork_server`, or of one that
    belongs to the cluster.

    Raises:
        BatonError: a process cannot start, or the response is late or wrong.
    """
    config = ClusterConfig(
        model=task.model, decode_pp=2, listen="127.0.0.1:0", fork_server=fork_server
    )
    console.print("starting a router, a prefill worker and a decode pool of two stages")
    await _run(config, task, console, "prefill read every word, and the cache crossed to decode")
    config = config.model_copy(update={"decode_pp": 1, "aggregated": True})
    console.print("\nthe same with one worker that prefills and decodes")
    await _run(config, task, console, "the worker went on where it had read the prompt")


async def _run(config: ClusterConfig, task: DemoTask, console: Console, explanation: str) -> None:
    """Ask a cluster, and show its state at rest."""
    started = time.monotonic()
    printer = QuietPrinter(console)
    cluster = LocalCluster(config, sink=StartPrinter(printer, own="baton"))
    async with cluster, AsyncBatonClient(cluster.address) as client:
        console.print(f"serving on {cluster.address} after {time.monotonic() - started:.1f} s\n")
        await _ask(client, task, console, explanation)
        console.print(status_view(await status_at_rest(client)))
        printer.mute()


async def status_at_rest(client: AsyncBatonClient) -> ClusterStatus:
    """Return the status once the workers report that nothing is held any more, or on timeout."""
    status = await client.cluster_status()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REST_TIMEOUT_S):
            while any(worker.open_sessions or worker.running_requests for worker in status.workers):
                await asyncio.sleep(REPORT_S)
                status = await client.cluster_status()
    return status


async def _ask(
    client: AsyncBatonClient, task: DemoTask, console: Console, explanation: str
) -> None:
    query = Query(
        (ChatMessage("user", task.prompt),),
        Sampling(temperature=0.0),
        Stop(max_tokens=48),
    )
    story = task.prompt.removesuffix(task.question).strip()
    console.print(
        f"{story}\n[bold]{task.question}[/bold]\n".lstrip(), highlight=False, soft_wrap=True
    )
    events: list[Event] = []
    sent = time.monotonic()
    ttft_s: float | None = None
    async with contextlib.aclosing(client.generate(query, timeout_s=ANSWER_TIMEOUT_S)) as stream:
        async for event in stream:
            events.append(event)
            if isinstance(event, Chunk):
                ttft_s = time.monotonic() - sent if ttft_s is None else ttft_s
                console.print(
                    event.text,
                    end="",
                    style="bold green",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
    console.print("\n")
    completion = completion_of(events)
    task.check(completion.text)
    console.print(f"right: {explanation}\n")
    console.print(timings_table(completion, ttft_s=ttft_s or 0.0))
