"""A role process without an engine: it takes a role's flags, serves health (and an echo, as
router), and announces itself.

The name of the "model" selects its behavior: "broken" exits at once with an error, "refused" exits
like a role that refuses its settings, "slow" never serves, and neither does one with a file of that
name. While a file "kernels" exists, prefill compiles.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from protos import generation_pb2_grpc
from runtime.observe.log import LogStyle, configure, report_end
from runtime.observe.metrics.calls import RpcMetrics
from runtime.process.announce import Announcement, write_announcement
from runtime.process.start_progress import KERNELS
from runtime.process.supervision import EXIT_CONFIG, StopSignal, run_process
from runtime.rpc.server import GrpcServer, ServerOptions
from tests.support.router.generation import EchoGeneration

SERVICES = {
    "router": "baton.v1.Generation",
    "prefill": "baton.v1.Prefill",
    "decode": "baton.v1.Decode",
}


def main(role: str) -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--listen", "--announce"):
        parser.add_argument(flag, type=Path if flag != "--listen" else str)
    parser.add_argument("--log-style", type=LogStyle, default=LogStyle.HUMAN)
    flags, rest = parser.parse_known_args()
    configure(level="info", style=flags.log_style, role=role)
    if "--check-settings" in rest:
        sys.exit()
    print(f"{role} on cores {sorted(os.sched_getaffinity(0))} with {' '.join(rest)}", flush=True)
    if role == "prefill" and (flags.model / "kernels").exists():
        print(KERNELS % (3, 37), flush=True)
        while (flags.model / "kernels").exists():
            time.sleep(0.02)
    if flags.model.name == "broken" and role == "decode":
        sys.exit("the weights are not readable")

    if flags.model.name == "refused" and role == "decode":
        report_end(f"{role}: the settings do not fit")
        sys.exit(EXIT_CONFIG)

    async def run(stop: StopSignal) -> None:
        server = GrpcServer(
            ServerOptions(listen=flags.listen),
            services=(SERVICES[role],),
            metrics=RpcMetrics.create(CollectorRegistry()),
        )
        if role == "router":
            generation_pb2_grpc.add_GenerationServicer_to_server(EchoGeneration(), server.grpc)
        address = await server.start()
        if flags.model.name != "slow" and not (flags.model / "slow").exists():
            await server.health.set_serving(SERVICES[role])
        write_announcement(
            flags.announce, Announcement(address, None, os.getpid(), str(os.getpid()))
        )
        await stop.wait()
        await server.drain(grace_s=1)

    sys.exit(run_process(role, run))
