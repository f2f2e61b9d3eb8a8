"""Messages between a supervisor and its fork server (`pool.fork_server`).

They travel over a Unix socket that preserves message boundaries. An order carries one descriptor,
the worker's stdout and stderr. The fork server responds twice: when the worker runs, and when it
has ended.
"""

import json
import socket
import struct
from dataclasses import asdict, dataclass

from runtime.errors import UnavailableError

_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid, see unix(7)
MAX_BYTES = 1 << 18  # an environment is a few KiB


@dataclass(frozen=True)
class Order:
    """Worker to fork: `python -m MODULE ARG...` in the given folder and environment.

    `core` is as `tie_to_parent` takes it.
    """

    number: int  # unique in this connection
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    core: str


@dataclass(frozen=True)
class OrderAnswer:
    """State of an ordered worker.

    `code` is set once the worker has ended: its exit code, or the negated number of a signal.
    """

    number: int
    pid: int
    code: int | None = None


def open_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def is_from_user(channel: socket.socket, user_id: int) -> bool:
    """Return whether the peer process belonged to this user when it connected."""
    _, found, _ = _CREDENTIALS.unpack(
        channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(found == user_id)


def send_order(channel: socket.socket, order: Order, output: int) -> None:
    """Send an order; `output` stays open here. Raises UnavailableError if sending fails."""
    message = json.dumps(asdict(order)).encode()
    try:
        socket.send_fds(channel, [message], [output])
    except OSError as error:
        raise UnavailableError(f"the fork server accepts no order: {error.strerror}") from error


def receive_order(channel: socket.socket) -> tuple[Order, int] | None:
    """Receive an order and the descriptor of the worker's output.

    Returns None if the supervisor is gone.
    """
    message, (*outputs,), _, _ = socket.recv_fds(channel, MAX_BYTES, 1)
    if not message:
        return None
    values = json.loads(message)
    return Order(**{**values, "arguments": tuple(values["arguments"])}), outputs[0]


def send_answer(channel: socket.socket, answer: OrderAnswer) -> None:
    channel.send(json.dumps(asdict(answer)).encode())


def receive_answer(channel: socket.socket) -> OrderAnswer | None:
    """Receive an answer, or None if the fork server is gone."""
    message = channel.recv(MAX_BYTES)
    return OrderAnswer(**json.loads(message)) if message else None
