"""A DNS server whose answers change.

with NameServer() as names:                                 # on a free port of 127.0.0.1
    names.answers["worker.test"] = ["127.0.0.2"]            # [] or absent: no such name; None: silence
    target = f"dns://{names.address}/worker.test:7000"      # for gRPC's own resolver
"""

import socket
import struct
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.network.hosts import is_private, rerun_private

NAME_SERVER = ("127.0.0.53", 53)
A, AAAA = 1, 28
_FLAGS, _NO_SUCH_NAME = 0x8180, 3  # a response, recursion available; RFC 1035, 4.1.1
_POINTER_TO_QUESTION = b"\xc0\x0c"


class NameServer:
    """Answers A and AAAA over UDP. Use as a context manager."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.answers: dict[str, list[str] | None] = {}
        self.garbage = b""  # sent in place of responses, if set
        self.num_asked = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, port))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()
        return f"{host}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        address = self._socket.getsockname()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", address)  # ends the wait for a question
        self._thread.join(10)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            question, caller = self._socket.recvfrom(4096)
            if not question:
                return
            self.num_asked += 1
            if (answer := self.garbage or self._answer(question)) is not None:
                self._socket.sendto(answer, caller)

    def _answer(self, question: bytes) -> bytes | None:
        name, end = _name_in(question)
        kind = struct.unpack(">H", question[end : end + 2])[0]
        addresses = self.answers.get(name, [])
        if addresses is None:
            return None
        family = socket.AF_INET6 if kind == AAAA else socket.AF_INET
        shown = [
            socket.inet_pton(family, each) for each in addresses if (":" in each) == (kind == AAAA)
        ]
        flags = _FLAGS | (0 if addresses else _NO_SUCH_NAME)
        records = b"".join(
            _POINTER_TO_QUESTION + struct.pack(">HHIH", kind, 1, 0, len(each)) + each
            for each in shown
        )
        return (
            question[:2]
            + struct.pack(">HHHHH", flags, 1, len(shown), 0, 0)
            + question[12 : end + 4]
            + records
        )


def _name_in(question: bytes) -> tuple[str, int]:
    """Return the name asked for, and where its type begins."""
    labels, at = [], 12
    while length := question[at]:
        labels.append(question[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels).lower(), at + 1


def become_named(module: str) -> None:
    """Run `module` of the same command line again in a private network that resolves all names by
    NAME_SERVER; return there.

    Raises:
        ConfigError: this machine does not allow it; the message says what is missing.
    """
    if not is_private():
        rerun_private(module)
    with tempfile.TemporaryDirectory(prefix="baton-resolv-") as folder:
        settings = Path(folder) / "resolv.conf"
        settings.write_text(f"nameserver {NAME_SERVER[0]}\noptions timeout:1 attempts:2\n")
        for command in (
            ["ip", "link", "set", "lo", "up"],
            ["mount", "--bind", str(settings), "/etc/resolv.conf"],
        ):
            subprocess.run(command, check=True, timeout=30)
