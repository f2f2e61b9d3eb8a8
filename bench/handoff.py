"""`python -m bench.handoff`: one prompt's cache from pool to pool between two processes.

28 layers of 8 kv heads with head_dim 128 in bf16, 2,048 tokens in scattered pages of 64: 896 items
of 256 KiB, 235 MB, through two transfer agents with every digest computed and checked. The clock
runs from "all layers are computed" on the source to "everything has landed and is checked" on the
destination.

The reference is UCX's own `tag_bw` of `ucx_perftest`, with 64 MiB messages (out of cache, no
digests, nothing scattered) under the same UCX settings, from memory written before
(`bench.ucx_reference`). `zeros_gbps` is the same from memory that was never written. All take
turns, and each side has its own core, as in containers. The pools are in huge pages, as in the
roles. Figures are medians over rounds in GB/s (1e9 bytes); the ratio is the median of the rounds'
ratios. `foreign_cores` is the number of cores that other processes used; above 0.2 the figures are
noise.

With `--device cuda` both pools are on that device, so every byte crosses pinned buffers on both
sides. `copy_gbps` is then a copy from the device to pinned memory, the upper bound for one side.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Mapping

from bench.report import OtherLoad, Value, render
from bench.ucx_reference import UcxReference
from runtime.errors import ConfigError
from transfer.ucx.settings import TransportProfile

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}  # torch reads it at import


def measure(
    profile: TransportProfile, device: str, rounds: int, cores: tuple[int, int]
) -> Mapping[str, Value]:
    """Alternate handoffs and reference runs. `cores`: of the sending and the receiving side."""
    from bench.handoff_pools import Destination, check_device, copy_gbps, source_process

    check_device(device)

    reference = UcxReference(profile, cores)
    others = OtherLoad()
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[1]})
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    source = context.Process(
        target=source_process, args=(there, profile, device, cores[0]), daemon=True
    )
    source.start()
    destination = Destination(profile, device)
    ours = []
    theirs = []
    zeros = []
    try:
        destination.handoff(here, 0)  # open connections and touch memory for the first time
        for number in range(1, rounds + 1):
            ours.append(destination.handoff(here, number))
            theirs.append(reference.gbps())
            zeros.append(reference.gbps_of_zeros())
        here.send(None)
        source.join(30)
    finally:
        destination.close()
        source.kill()
        os.sched_setaffinity(0, usable)
    on_device: dict[str, Value] = (
        {} if device == "cpu" else {"device": device, "copy_gbps": copy_gbps(device)}
    )
    return {
        "transport": profile.value,
        **on_device,
        "gbps": round(statistics.median(ours), 3),
        "reference_gbps": round(statistics.median(theirs), 3),
        "ratio": round(
            statistics.median(one / other for one, other in zip(ours, theirs, strict=True)), 3
        ),
        "zeros_gbps": round(statistics.median(zeros), 3),
        "num_bytes": destination.num_bytes,
        "rounds": rounds,
        **others.figures(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--transport",
        choices=("shm", "tcp"),
        action="append",
        help="transport to measure; default: both in turn",
    )
    parser.add_argument(
        "--device", default="cpu", help="device of both pools: cpu (default), cuda or cuda:N"
    )
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds; default 7")
    parser.add_argument("--json", action="store_true", help="print one JSON object per transport")
    flags = parser.parse_args()
    os.environ.update(HUGE_PAGES)
    usable = sorted(os.sched_getaffinity(0))
    for transport in flags.transport or ("shm", "tcp"):
        try:
            figures = measure(
                TransportProfile(transport), flags.device, flags.rounds, (usable[-1], usable[0])
            )
        except ConfigError as error:
            sys.exit(f"error: {error}")
        print(render("handoff", figures, as_json=flags.json), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
