"""Start and end of grammar processes, on their owner's side (`fork_server` is the other side)."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runtime.errors import UnavailableError
from runtime.grammar.messages import MAX_MESSAGE_BYTES

FORK_SERVER_START_S = 60.0
FORK_S = 5.0


class GrammarForkServer:
    """Launcher of grammar processes. Thread-safe."""

    def __init__(self, tokenizer_json: Path, end_token_ids: Sequence[int]) -> None:
        self._arguments = [str(tokenizer_json.resolve()), *map(str, end_token_ids)]
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def fork(self) -> "GrammarChild":
        """Start a process for a grammar.

        Raises UnavailableError if the fork server is not running and cannot be started.
        """
        with self._lock:
            if self._is_closed:
                raise UnavailableError(
                    "grammars are no longer compiled: the process is shutting down"
                )
            for is_last in (False, True):  # replaces a dead fork server once
                try:
                    return self._fork(self._control or self._start())
                except (OSError, IndexError) as error:
                    self._end()
                    if is_last:
                        raise UnavailableError(
                            f"no process for a grammar could be started: {error}"
                        ) from error
        raise AssertionError

    def close(self) -> None:
        """End the fork server and all of its children."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _start(self) -> socket.socket:
        ours, theirs = _socket_pair()
        with theirs:
            # The output goes to the null device: the library would print clients' grammars.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "runtime.grammar.fork_server",
                    str(theirs.fileno()),
                    *self._arguments,
                ],
                cwd=Path(__file__).parents[2],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._control = ours
        ours.settimeout(FORK_SERVER_START_S)
        if not ours.recv(16):
            raise OSError("the tokenizer could not be loaded")
        ours.settimeout(FORK_S)
        return ours

    @staticmethod
    def _fork(control: socket.socket) -> "GrammarChild":
        ours, theirs = _socket_pair()
        try:
            with theirs:
                socket.send_fds(control, [b"fork"], [theirs.fileno()])
            return GrammarChild(ours, socket.recv_fds(control, 16, 1)[1][0])
        except (OSError, IndexError):
            ours.close()
            raise

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


class GrammarChild:
    """One forked process: a socket for messages, and a file descriptor to kill it by."""

    def __init__(self, owner: socket.socket, pidfd: int) -> None:
        self._socket = owner
        self._pidfd = pidfd
        self._lock = threading.Lock()
        self._is_open = True

    def send(self, message: bytes, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        self._socket.send(message)

    def receive(self, timeout_s: float) -> bytes:
        """Receive a message. Raises OSError if the process has ended, TimeoutError if it is late."""
        self._socket.settimeout(max(1e-3, timeout_s))
        data = self._socket.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise ConnectionError("the process has ended")
        return data

    def cpu_s(self) -> float:
        """Return the CPU time of the process in seconds, or 0 after its end. Thread-safe."""
        with self._lock, suppress(OSError, IndexError):
            if self._is_open:
                return _cpu_s(self._pidfd)
        return 0.0

    def kill(self) -> None:
        """Kill the process, which ends every wait for it. Thread-safe."""
        with self._lock:
            if self._is_open:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._pidfd)
                self._socket.close()


def _cpu_s(pidfd: int) -> float:
    """Return the CPU time of a process from the fields of proc_pid_stat(5).

    Raises OSError or IndexError if the process has ended.
    """
    told = dict(
        line.split(":", 1) for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    )
    fields = Path(f"/proc/{int(told['Pid'])}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
