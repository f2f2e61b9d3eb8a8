"""`python -m bench.start`: from `baton up` to the first response.

Each round starts a cluster as a user does, sends one request, and stops the cluster. Times are also
given relative to those of a new interpreter that imports the libraries which every worker needs,
in the same round. Kernels are those that earlier starts have kept; `--cold` gives each round an empty
folder for them. Further flags, after `--`, are those of `baton up`.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from baton.client import AsyncBatonClient
from baton.cluster_config import demo_model
from baton.values import Query, Sampling, Stop
from bench.arguments import at_least
from bench.command import benchmark_flags, run_benchmark
from bench.report import OtherLoad, Value
from runtime.errors import DeadlineError, UnavailableError

LIBRARIES = "import grpc.aio, numba, torch"
LIMIT_S = 600.0  # of a start; kernels of every kind may have to be compiled
STOP_S = 30.0
_ADDRESS = "router: "
_READY = "ready: "


@dataclass(frozen=True)
class StartTimes:
    """The times of one start, in seconds.

    `cpu_s` is of all processes of the cluster until it is ready. `imports_s` is the reference.
    """

    imports_s: float
    ready_s: float
    cpu_s: float
    first_token_s: float
    stop_s: float


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    others = OtherLoad()
    rounds = []
    for _ in range(flags.rounds):
        with ExitStack() as stack:
            environment = dict(os.environ)
            if flags.cold:
                folder = tempfile.TemporaryDirectory(prefix="bench-start-")
                environment["NUMBA_CACHE_DIR"] = stack.enter_context(folder)
            rounds.append(await start(flags.model, flags.up, environment))
    values = {
        name: statistics.median(asdict(each)[name] for each in rounds) for name in asdict(rounds[0])
    }
    ratios = [each.ready_s / each.imports_s for each in rounds]
    return {
        **values,
        "ready_per_imports": statistics.median(ratios),
        "ready_s_least": min(each.ready_s for each in rounds),
        "ready_s_most": max(each.ready_s for each in rounds),
        **others.figures(),
    }


async def start(model: Path, up_flags: Sequence[str], environment: Mapping[str, str]) -> StartTimes:
    """Start a cluster, send one request and stop it.

    Raises:
        UnavailableError: the cluster ended before it was ready.
        DeadlineError: it was not ready in time.
    """
    began_s = time.monotonic()
    importing = await asyncio.create_subprocess_exec(sys.executable, "-c", LIBRARIES)
    await importing.wait()
    imports_s = time.monotonic() - began_s
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "baton", "up", "--model", str(model), "--listen", "127.0.0.1:0", *up_flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        address = await _ready_at(process)
        ready_s = time.monotonic() - began_s
        cpu_s = _cpu_s(process.pid)
        began_s = time.monotonic()
        query = Query((1, 2, 3), Sampling(temperature=0), Stop(max_tokens=1, ignore_eos=True))
        async with AsyncBatonClient(address) as client:
            await client.complete(query, timeout_s=60)
        first_token_s = time.monotonic() - began_s
        began_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(STOP_S):
            await process.communicate()
        return StartTimes(imports_s, ready_s, cpu_s, first_token_s, time.monotonic() - began_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ready_at(process: asyncio.subprocess.Process) -> str:
    """Return the router's address once the cluster is ready."""
    assert process.stdout is not None
    address, last = "", ""
    try:
        async with asyncio.timeout(LIMIT_S):
            async for line in process.stdout:
                last = line.decode(errors="replace").strip()
                if _ADDRESS in last:
                    address = last.partition(_ADDRESS)[2].partition(",")[0]
                if _READY in last:
                    return address
    except TimeoutError:
        raise DeadlineError(f"baton up was not ready after {LIMIT_S:g} s: {last}") from None
    raise UnavailableError(f"baton up ended: {last}")


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its descendants, those that have ended included."""
    top = psutil.Process(pid)
    times = [each.cpu_times() for each in (top, *top.children(recursive=True))]
    return sum(
        each.user + each.system + each.children_user + each.children_system for each in times
    )


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--cold", action="store_true", help="compile all kernels at each start")
    parser.add_argument("up", nargs="*", metavar="FLAG", help="of baton up, after --")
    return run_benchmark("start", parser, measure)


if __name__ == "__main__":
    sys.exit(main())
