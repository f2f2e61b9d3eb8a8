"""What a supervisor and its fork server (`pool.fork_server`) send to each other over a Unix socket that
keeps messages apart.

An order goes with one descriptor, the worker's stdout and stderr. It is answered twice: when the
worker runs, and when it has ended.
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
    """A worker to fork: `python -m MODULE ARG...`, in that folder and environment, on that core, as
    `tie_to_parent` takes it."""

    number: int  # of this connection
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    core: str


@dataclass(frozen=True)
class OrderAnswer:
    """`code` once the worker has ended: its exit code, or minus a signal's number."""

    number: int
    pid: int
    code: int | None = None


def open_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def is_from_user(channel: socket.socket, user_id: int) -> bool:
    """Return whether the process at the other end of a connection was this user's when it
    connected."""
    _, found, _ = _CREDENTIALS.unpack(
        channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(found == user_id)


def send_order(channel: socket.socket, order: Order, output: int) -> None:
    """`output` stays open here. Raises UnavailableError when it cannot go out."""
    message = json.dumps(asdict(order)).encode()
    try:
        socket.send_fds(channel, [message], [output])
    except OSError as error:
        raise UnavailableError(f"the fork server takes no order: {error.strerror}") from error


def receive_order(channel: socket.socket) -> tuple[Order, int] | None:
    """With the descriptor that is the worker's output now; None when the supervisor is gone."""
    message, (*outputs,), _, _ = socket.recv_fds(channel, MAX_BYTES, 1)
    if not message:
        return None
    values = json.loads(message)
    return Order(**{**values, "arguments": tuple(values["arguments"])}), outputs[0]


def send_answer(channel: socket.socket, answer: OrderAnswer) -> None:
    channel.send(json.dumps(asdict(answer)).encode())


def receive_answer(channel: socket.socket) -> OrderAnswer | None:
    """None when the fork server is gone."""
    message = channel.recv(MAX_BYTES)
    return OrderAnswer(**json.loads(message)) if message else None
