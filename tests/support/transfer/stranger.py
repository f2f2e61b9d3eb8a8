"""A process that found UCX ports: it sends whatever messages it likes, and knows nothing that
travels over gRPC.

`python -m tests.support.transfer.stranger SECONDS ADDRESS...` (hex, as processes exchange them)
floods each address with messages that fit the tags and frames of pools without a key, prints how
many it has sent to each, and ends.
"""

import random
import struct
import sys
import time
from collections.abc import Iterator
from typing import Self

from transfer.transport.binding import ANYWHERE
from transfer.ucx.address import unframe_address
from transfer.ucx.api import UcxEndpoint, UcxLibrary, UcxRequest
from transfer.ucx.settings import TransportProfile, close_endpoint, create_worker

SENT_TIMEOUT_S = 60.0
MAX_STEPS = 64


class Stranger:
    """A UCX worker. Messages that were sent are not waited for, unless asked."""

    def __init__(self, profile: TransportProfile = TransportProfile.TCP) -> None:
        self._ucx = UcxLibrary()
        self._context, self._worker = create_worker(self._ucx, profile, "stranger", {}, ANYWHERE)
        self._endpoints: dict[bytes, UcxEndpoint] = {}
        self._requests: list[tuple[UcxRequest, bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for endpoint in self._endpoints.values():
            close_endpoint(endpoint)
        self._worker.progress()

    def send(self, address: bytes, tag: int, data: bytes | bytearray | memoryview) -> None:
        """Send one message under any tag."""
        endpoint = self._endpoints.get(address)
        if endpoint is None:
            endpoint = self._endpoints[address] = self._worker.create_endpoint_from_worker_address(
                self._ucx.address(unframe_address(address)), endpoint_error_handling=True
            )
        kept = bytes(data)
        self._requests.append((endpoint.tag_send(self._ucx.array(kept), self._ucx.tag(tag)), kept))
        self._worker.progress_once()

    @property
    def num_under_way(self) -> int:
        return len(self._requests)

    def progress(self) -> bool:
        """Progress operations in flight; return whether there were any."""
        for _ in range(MAX_STEPS):
            if not self._worker.progress_once():
                break
        self._requests = [pair for pair in self._requests if not pair[0].completed]
        return bool(self._requests)


def plausible_messages(seed: int) -> Iterator[tuple[int, bytes]]:
    """Yield tags and messages without end: frames with magic and schema under tags of small epochs
    and ranks; items under tags of small sessions; and random tags."""
    numbers = random.Random(seed)
    while True:
        kind, sequence = numbers.choice((1, 2, 3, 4, 5)), numbers.randrange(1, 200)
        body = b"\x93\x91\x94" + numbers.randbytes(numbers.choice((0, 8, 40, 3000)))
        schema = numbers.choice((11, 12, 13))
        frame = struct.pack("<4sBBBxHxxIQ", b"BATN", schema, kind, 1, 0, len(body), sequence) + body
        frame = numbers.choice((b"", bytes(24), numbers.randbytes(24))) + frame
        epoch, rank = numbers.randrange(1, 6), numbers.randrange(3)
        yield numbers.choice(
            (
                (epoch << 16 | rank, frame),
                (epoch << 24 | rank, numbers.randbytes(4096)),
                (numbers.getrandbits(64), frame),
                (rank, frame),
                (numbers.getrandbits(64), numbers.randbytes(20_000)),
            )
        )


def main() -> None:
    seconds, addresses = float(sys.argv[1]), [bytes.fromhex(text) for text in sys.argv[2:]]
    count = 0
    with Stranger() as stranger:
        ends_s = time.monotonic() + seconds
        for tag, message in plausible_messages(7):
            if time.monotonic() >= ends_s:
                break
            for address in addresses:
                stranger.send(address, tag, message)
            count += 1
            while stranger.num_under_way > 256 and time.monotonic() < ends_s + SENT_TIMEOUT_S:
                stranger.progress()
        while stranger.progress() and time.monotonic() < ends_s + SENT_TIMEOUT_S:
            pass
    print(count, flush=True)


if __name__ == "__main__":
    main()
