"""A process of its own that sends over UCX until it is killed.

`python -m tests.support.transfer.transfer_child PROFILE NUM_BYTES NUM_MESSAGES`: prints its address
as hex, reads the peer's and the first tag from its input, posts all its sends, prints "posted" and
keeps the transport going.
"""

import subprocess
import sys
from pathlib import Path

from runtime.clock import SystemClock
from transfer.ucx.settings import TransportProfile
from transfer.ucx.transport import UcxTransport

CHILD_FILL = 0x5A
_ROOT = Path(__file__).resolve().parents[3]


class SendingChild:
    """The parent's handle on such a process."""

    def __init__(self, profile: TransportProfile, num_bytes: int, num_messages: int) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.transfer.transfer_child",
                profile,
                str(num_bytes),
                str(num_messages),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self.address = bytes.fromhex(self._read())

    def send_to(self, address: bytes, first_tag: int) -> None:
        """Post all sends."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{address.hex()} {first_tag}\n")
        self.process.stdin.flush()
        assert self._read() == "posted"

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def main() -> None:
    profile, num_bytes, num_messages = (
        TransportProfile(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
    )
    transport = UcxTransport(profile=profile, clock=SystemClock())
    print(transport.address.hex(), flush=True)
    address, first_tag = sys.stdin.readline().split()
    peer = transport.connect(bytes.fromhex(address))
    data = memoryview(bytearray([CHILD_FILL]) * num_bytes)
    for i in range(num_messages):
        transport.send(peer, int(first_tag) + i, data)
    print("posted", flush=True)
    while True:
        transport.progress()
        transport.wait(0.001)


if __name__ == "__main__":
    main()
