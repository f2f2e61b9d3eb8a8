"""A second stage in a process of its own: sends every frame back until it is killed.

`python -m tests.support.channel_child PROFILE`: prints its address as hex, reads the leader's from its input.
"""

import sys

from runtime.errors import PeerLostError
from transfer.stage_channel import UcxStageChannel
from transfer.ucx_settings import TransportProfile

MAX_FRAME_BYTES = 16 << 20


def main() -> None:
    channel = UcxStageChannel(rank=1, max_frame_bytes=MAX_FRAME_BYTES, profile=TransportProfile(sys.argv[1]))
    print(channel.address.hex(), flush=True)
    leader, epoch = sys.stdin.readline().split()
    channel.connect([bytes.fromhex(leader), channel.address], int(epoch))
    try:
        while True:
            frame = channel.receive(0, timeout_s=1.0)
            if frame is not None:
                channel.send(0, frame, timeout_s=5.0)
    except PeerLostError:
        channel.close()


if __name__ == "__main__":
    main()
