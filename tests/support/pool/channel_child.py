"""A stage in a process of its own: sends every packet on to the next stage, or from the last back
to stage 0.

`python -m tests.support.pool.channel_child KIND RANK` prints its address as hex, then reads epochs
with the addresses of all stages from its input. It prints "formed" when it takes frames of an
epoch, and "lost" when a neighbor is lost. It ends with its input.
"""

import sys

import torch

from engine.pipeline.channel import Packet
from pool.pipeline.stage_channel import PoolChannel
from runtime.errors import PeerLostError
from testing.gloo_link import GlooBackend
from tests.support.pool.formings import forming_of
from transfer.ucx.settings import TransportProfile
from transfer.ucx.stage_channel import UcxStageChannel

MAX_BYTES = 16 << 20
LOCALHOST = "127.0.0.1"
KINDS = ("shm", "tcp", "lanes")


def channel_of(rank: int, kind: str) -> PoolChannel:
    """Build a channel. `kind`: a UCX profile with tensors within the frames, or lanes by gloo."""
    profile = TransportProfile.SHM if kind == "lanes" else TransportProfile(kind)
    frames = UcxStageChannel(rank=rank, max_frame_bytes=MAX_BYTES + 4096, profile=profile)
    return PoolChannel(
        frames,
        rank=rank,
        max_bytes=MAX_BYTES,
        why="was told so",
        backend=GlooBackend(LOCALHOST) if kind == "lanes" else None,
    )


def main() -> None:
    torch.set_num_threads(1)
    rank = int(sys.argv[2])
    channel = channel_of(rank, sys.argv[1])
    print(channel.address.hex(), flush=True)
    for line in sys.stdin:
        epoch, *addresses = line.split()
        channel.connect(
            [bytes.fromhex(address) for address in addresses],
            forming_of(int(epoch), len(addresses)),
        )
        print("formed", flush=True)
        try:
            while True:
                packet = channel.receive(rank - 1, timeout_s=1.0)
                if packet is not None:
                    pass_on(channel, packet, (rank + 1) % len(addresses))
        except PeerLostError:
            print("lost", flush=True)
    channel.close()


def pass_on(channel: PoolChannel, packet: Packet, rank: int) -> None:
    """Pass a packet on. Tensors cannot return to stage 0, so their sums go in the frame."""
    sums = b"".join(b" %d" % int(tensor.sum()) for tensor in packet.tensors)
    sent = (
        Packet(bytes(packet.record) + sums)
        if rank == 0
        else Packet(bytes(packet.record), packet.tensors)
    )
    channel.send(rank, sent, timeout_s=60.0)


if __name__ == "__main__":
    main()
