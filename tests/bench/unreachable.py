"""`python -m tests.bench.unreachable`: connects UCX to a worker on a host that no packet reaches
any more.

In a network of its own; prints "connected" when `connect` has returned. Ends with 77 where
namespaces are refused.
"""

import subprocess
import sys
from pathlib import Path

from runtime.clock import SystemClock
from runtime.errors import ConfigError
from tests.support.network.hosts import Network, become_private, enter, is_private
from transfer.transport.binding import NetworkBinding
from transfer.ucx.settings import TransportProfile
from transfer.ucx.transport import UcxTransport

MODULE, REFUSED, MOST_S = "tests.bench.unreachable", 77, 60
ROOT = Path(__file__).resolve().parents[2]


def listen() -> None:
    """Print the address and wait to be killed."""
    enter("right")
    print(_transport().address.hex(), flush=True)
    sys.stdin.read()


def connect(address: str) -> None:
    enter("left")
    _transport().connect(bytes.fromhex(address))
    print("connected", flush=True)


def _transport() -> UcxTransport:
    return UcxTransport(
        profile=TransportProfile.TCP, clock=SystemClock(), binding=NetworkBinding.parse("eth0", "")
    )


def main() -> int:
    match sys.argv[1:]:
        case ["right"]:
            listen()
        case ["left", address]:
            connect(address)
        case _:
            try:
                if not is_private():
                    become_private(MODULE)
            except ConfigError as error:
                print(error, file=sys.stderr)
                return REFUSED
            _cut_off()
    return 0


def _cut_off() -> None:
    with (
        Network(("left", "right")) as network,
        subprocess.Popen(
            [sys.executable, "-m", MODULE, "right"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as right,
    ):
        assert right.stdout is not None
        address = right.stdout.readline().strip()
        network.cut("left", "right")
        left = subprocess.run(
            [sys.executable, "-m", MODULE, "left", address],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=MOST_S,
            check=True,
        )
        print(left.stdout, flush=True)
        right.kill()


if __name__ == "__main__":
    sys.exit(main())
