"""A decode worker that flips one bit of one of the frames that it sends to another stage: FRAME
BIT, then its flags."""

import sys
from itertools import count

from decode.__main__ import main
from transfer.ucx.stage_channel import UcxStageChannel

frame_number, bit = int(sys.argv.pop(1)), int(sys.argv.pop(1))
put, numbers = UcxStageChannel.put, count()


def flip(
    channel: UcxStageChannel,
    rank: int,
    tag: int,
    frame: bytearray,
    *,
    deadline_s: float,
    timeout_s: float,
) -> None:
    """Flip a bit after the frame was sealed, as a faulty network card would."""
    if next(numbers) == frame_number:
        frame = bytearray(frame)
        frame[bit // 8 % len(frame)] ^= 1 << bit % 8
    put(channel, rank, tag, frame, deadline_s=deadline_s, timeout_s=timeout_s)


UcxStageChannel.put = flip  # type: ignore[method-assign,assignment]
main()
