"""Output of `baton status` at any terminal width, and the rates between two polls."""

import asyncio
import io
import json
import signal
import sys
from dataclasses import replace

from rich.console import Console

from baton.render import StartPrinter, status_view
from baton.status_command import StatusSample, token_rates
from baton.values import ClusterStatus, DataRankStatus, PlacementCount, WorkerStatus
from tests.support.router.generation import EchoGeneration, serve_echo

PREFILL = WorkerStatus(
    role="prefill",
    address="127.0.0.1:40001",
    serving=True,
    reason="",
    incarnation="a",
    stages=("0-32",),
    queued_requests=3,
    running_requests=1,
    pages_total=99999,
    pages_free=88888,
    slots_total=16,
    slots_free=15,
    open_sessions=2,
)
DECODE = WorkerStatus(
    role="decode",
    address="[fd00:10:244::17]:7000",
    serving=True,
    reason="",
    incarnation="b",
    stages=("0-8", "8-16", "16-24", "24-32"),
    queued_requests=0,
    running_requests=12,
    pages_total=123456,
    pages_free=61728,
    slots_total=48,
    slots_free=36,
    open_sessions=12,
)


def drawn(*workers: WorkerStatus, rates: dict[str, float] | None = None) -> list[str]:
    drawn_on = io.StringIO()
    Console(width=80, file=drawn_on).print(
        status_view(ClusterStatus("model", 1, 13, workers), rates)
    )
    return drawn_on.getvalue().splitlines()


def test_eighty_columns_hold_all_of_it() -> None:
    lines = drawn(PREFILL, DECODE, rates={PREFILL.address: 12345.0, DECODE.address: 678.4})
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for word in (
        "88888/99999",
        "50 %",
        "15/16",
        "12345",
        "678",
        "├ 0-32 ┤",
        "[fd00:10:244::17]:7000",
    ):
        assert word in text
    assert "├ 0-8 ┼ 8-16 ┼" in text


def test_a_bar_shows_the_pages_that_are_taken() -> None:
    for free, bar in ((9, "░░░░░░░░░"), (8, "█░░░░░░░░"), (0, "█████████")):
        assert bar in "\n".join(drawn(replace(PREFILL, pages_total=9, pages_free=free)))


def test_a_worker_that_does_not_serve_and_one_in_a_long_step_stand_out() -> None:
    lines = drawn(
        replace(PREFILL, serving=False, reason="waiting for 1 more stages to join"),
        replace(DECODE, busy_s=7.4),
    )
    assert lines[-1].startswith("prefill 127.0.0.1:40001: waiting for 1 more stages to join")
    assert "down" in "\n".join(lines)
    assert "7 s" in "\n".join(lines)


def test_placements_are_shown_where_there_was_a_choice() -> None:
    def shown(*placements: PlacementCount) -> str:
        drawn_on = io.StringIO()
        status = ClusterStatus("model", 0, 0, (PREFILL, DECODE), placements=placements)
        Console(width=80, file=drawn_on).print(status_view(status))
        return " ".join(drawn_on.getvalue().split())

    by_role = PlacementCount("disaggregated", "roles", 7)
    assert "placed" not in shown(by_role)
    text = shown(
        PlacementCount("aggregated", "load", 2),
        PlacementCount("aggregated", "no_handoff", 10),
        by_role,
    )
    assert "placed: 12 aggregated (load 2, no_handoff 10); 7 disaggregated (roles 7)" in text


def test_rates_are_tokens_between_two_looks() -> None:
    def at(seconds: float, *workers: WorkerStatus) -> StatusSample:
        return StatusSample(ClusterStatus("model", 0, 0, workers), seconds)

    before = at(
        10.0,
        replace(PREFILL, prompt_tokens=100, output_tokens=5),
        replace(DECODE, output_tokens=50),
    )
    now = at(
        12.0,
        replace(PREFILL, prompt_tokens=700, output_tokens=9),
        replace(DECODE, output_tokens=90, incarnation="c"),
        replace(DECODE, address="new", output_tokens=7),
    )
    assert token_rates(before, now) == {PREFILL.address: 300.0}, "others have restarted"


async def test_it_is_shown_again_until_it_is_interrupted() -> None:
    server, address = await serve_echo(EchoGeneration())
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "baton",
        "status",
        "--watch",
        "--json",
        "--target",
        address,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    async with asyncio.timeout(100):
        for _ in range(2):
            assert json.loads(await child.stdout.readline())["model"] == "echo"
    child.send_signal(signal.SIGINT)
    async with asyncio.timeout(100):
        assert await child.wait() in (0, 1, 130)
    await server.drain(grace_s=0)


def test_a_start_prints_warnings() -> None:
    seen: list[tuple[str, str]] = []
    printer = StartPrinter(lambda name, line: seen.append((name, line)), own="baton")
    lines = [
        ("baton", "04:29:54.895 info    starting"),
        ("router", "04:29:54.895 info    worker found"),
        ("decode-0", "04:29:54.895 warning the context is 2240 tokens"),
        ("decode-0", "Traceback:"),
    ]
    for line in lines:
        printer(*line)
    assert seen == [lines[0], lines[2], lines[3]]
    printer.ready()
    printer(*lines[1])
    assert seen[-1] == lines[1]


def test_ranks_that_share_a_stage_are_counted() -> None:
    assert "├ 0-32 ┤ x 2 ranks" in "\n".join(drawn(replace(PREFILL, tensor_size=2)))


def test_data_ranks_are_listed_below_the_stages_of_their_pool() -> None:
    ranks = (DataRankStatus(0, 3, 50, 0), DataRankStatus(0, 1, 90, 0))
    text = "\n".join(drawn(replace(DECODE, tensor_size=4, data_ranks=ranks)))
    assert "data 0: 3 run, 50 pages free" in text
    assert "data 1: 1 run, 90 pages free" in text
