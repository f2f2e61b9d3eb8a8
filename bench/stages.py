"""`python -m bench.stages`: cost of sending a batch from one stage to the next.

The first of two processes sends a frame with hidden states of some rows, the other responds with an
empty frame. The report has the round trip by rows, and that of an empty frame both ways as the
baseline. `ucx` puts tensors into the frame; `gloo` and `nccl` send them separately (nccl: stage 0
on cuda:0, stage 1 on cuda:1).
"""

import argparse
import subprocess
import sys
import time
from statistics import median

import torch
import torch.distributed

from bench.report import Value, render
from engine.pipeline.channel import Packet
from engine.pipeline.links import LinkBackend
from pool.pipeline.stage_channel import FRAME_OVERHEAD, PoolChannel
from runtime.errors import BatonError, ConfigError, PeerLostError
from testing.gloo_link import GlooBackend
from tests.support.pool.formings import forming_of
from transfer.ucx.settings import TransportProfile
from transfer.ucx.stage_channel import UcxStageChannel

CHANNELS = ("ucx", "gloo", "nccl")
MAX_BYTES = 64 << 20
ROWS = (1, 8, 32, 512)
TIMEOUT_S = 60.0
WARM_S = (
    # a stage that has shared its core, as with a starting process, sleeps for a tenth of a second
    0.5
)


def backend_of(name: str, rank: int) -> LinkBackend | None:
    """Return the backend of a channel, or raise ConfigError for nccl without two devices."""
    if name == "ucx":
        return None
    if name == "gloo":
        return GlooBackend("127.0.0.1")
    if torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
        raise ConfigError(
            "channel nccl needs two CUDA devices and a torch with NCCL", field="channel"
        )
    from engine.pipeline.nccl_link import NcclBackend  # its import fails if torch has no NCCL

    return NcclBackend(torch.device("cuda", rank))


def channel_of(name: str, rank: int) -> PoolChannel:
    backend = backend_of(name, rank)
    frames = UcxStageChannel(
        rank=rank, max_frame_bytes=MAX_BYTES + FRAME_OVERHEAD, profile=TransportProfile.AUTO
    )
    return PoolChannel(
        frames, rank=rank, max_bytes=MAX_BYTES, backend=backend, why="is set to use UCX"
    )


def answer(name: str) -> None:
    """Run the second stage until the first is gone."""
    channel = channel_of(name, 1)
    print(channel.address.hex(), flush=True)
    leader = bytes.fromhex(sys.stdin.readline())
    channel.connect([leader, channel.address], forming_of(1, 2))
    try:
        while True:
            if channel.receive(0, timeout_s=TIMEOUT_S) is not None:
                channel.send(0, Packet(b""), timeout_s=TIMEOUT_S)
    except PeerLostError:
        channel.close()


def round_trip_us(channel: PoolChannel, packet: Packet, repeats: int) -> float:
    """Return the median after both stages have run for WARM_S."""
    warm_s = time.perf_counter() + WARM_S
    times = list[float]()
    while len(times) < repeats:
        began_s = time.perf_counter()
        channel.send(1, packet, timeout_s=TIMEOUT_S)
        if channel.receive(1, timeout_s=TIMEOUT_S) is None:
            raise PeerLostError(f"the second stage did not answer within {TIMEOUT_S:g} s")
        if began_s >= warm_s:
            times.append(time.perf_counter() - began_s)
    return 1e6 * median(times)


def measure(name: str, hidden_size: int, repeats: int) -> dict[str, Value]:
    channel = channel_of(name, 0)
    with subprocess.Popen(
        [sys.executable, "-m", "bench.stages", "--channel", name, "--answer"],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as second:
        assert second.stdin is not None
        assert second.stdout is not None
        try:
            address = bytes.fromhex(second.stdout.readline())
            second.stdin.write(f"{channel.address.hex()}\n")
            second.stdin.flush()
            channel.connect([channel.address, address], forming_of(1, 2))
            device = torch.device("cuda", 0) if name == "nccl" else torch.device("cpu")
            values: dict[str, Value] = {
                "channel": name,
                "hidden_size": hidden_size,
                "empty_us": round_trip_us(channel, Packet(b""), repeats),
            }
            for rows in ROWS:
                hidden = torch.randn(rows, hidden_size, dtype=torch.bfloat16, device=device)
                values[f"rows_{rows}_us"] = round_trip_us(channel, Packet(b"", (hidden,)), repeats)
            return values
        finally:
            channel.close()
            second.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--channel", choices=CHANNELS, default="ucx")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2000, help="number of repeats; default 2000")
    parser.add_argument("--answer", action="store_true", help="run as the second stage (internal)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if arguments.answer:
            answer(arguments.channel)
        else:
            values = measure(arguments.channel, arguments.hidden_size, arguments.repeats)
            print(render("stages", values, as_json=arguments.json))
    except BatonError as error:
        sys.exit(f"bench.stages: {error}")


if __name__ == "__main__":
    main()
