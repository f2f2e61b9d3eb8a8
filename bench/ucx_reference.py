"""UCX's own bandwidth test as a reference: `ucx_perftest -t tag_bw` between two processes.

By default, the test never writes its send buffer. The whole buffer is then the kernel's one zero
page, which stays in the first-level cache at any message size, so the test sends without reading
memory. No sender of a cache can do that. The reference therefore allocates filled memory; the
default test is reported next to it.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from runtime.errors import ConfigError
from transfer.ucx.settings import HANDOFF_OPTIONS, TransportProfile, ucx_options

MESSAGE_BYTES = 64 << 20
ITERATIONS = 12
WARM_UP_ITERATIONS = 2
TIMEOUT_S = 120
START_S = 20
_OWN_MEMORY = {
    "UCX_ALLOC_PRIO": "heap",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=165",
}  # malloc fills the memory it returns


class UcxReference:
    """Test under the same UCX settings as a handoff, with endpoint error handling."""

    def __init__(self, profile: TransportProfile, cores: tuple[int, int]) -> None:
        """Find the test, or raise ConfigError if there is no ucx_perftest.

        `cores` are those of the sending and the receiving side.
        """
        self._cores = cores
        self._binary, libraries = _find_perftest()
        options = {
            f"UCX_{name}": value
            for name, value in {**ucx_options(profile), **HANDOFF_OPTIONS}.items()
        }
        paths = [*libraries, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
        self._environment = {
            **os.environ,
            **options,
            "UCX_WARN_UNUSED_ENV_VARS": "n",
            "LD_LIBRARY_PATH": ":".join(filter(None, paths)),
        }

    def gbps(self) -> float:
        """Return the GB/s (1e9 bytes) of one run."""
        return self._run({**self._environment, **_OWN_MEMORY})

    def gbps_of_zeros(self) -> float:
        """Return the GB/s of one run of the default test."""
        return self._run(self._environment)

    def _run(self, environment: dict[str, str]) -> float:
        port = _free_port()
        server = subprocess.Popen(
            [self._binary, "-p", str(port)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.sched_setaffinity(server.pid, {self._cores[1]})
        try:
            _wait_until_listening(server, port)
            client = subprocess.Popen(
                [
                    self._binary,
                    "localhost",
                    "-p",
                    str(port),
                    "-t",
                    "tag_bw",
                    "-s",
                    str(MESSAGE_BYTES),
                    "-n",
                    str(ITERATIONS),
                    "-w",
                    str(WARM_UP_ITERATIONS),
                    "-e",
                    "-v",
                    "-f",
                ],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            os.sched_setaffinity(client.pid, {self._cores[0]})
            try:
                printed, _ = client.communicate(timeout=TIMEOUT_S)
            finally:
                client.kill()
                client.wait()
        finally:
            server.kill()
            server.wait()
        if client.returncode:
            raise ConfigError(f"ucx_perftest ended with status {client.returncode}")
        # Last line: iterations, median and mean latency, overall latency, mean and overall
        # bandwidth (MiB/s), ...
        return float(printed.strip().splitlines()[-1].split(",")[5]) * (1 << 20) / 1e9


def _find_perftest() -> tuple[str, list[str]]:
    """Return the program and the folders of its libraries, of the libucx package or the system."""
    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / "bin" / "ucx_perftest").exists():
            return str(Path(folder) / "bin" / "ucx_perftest"), [str(Path(folder) / "lib")]
    system = shutil.which("ucx_perftest")
    if system is None:
        raise ConfigError("there is no ucx_perftest, neither in a libucx package nor on the PATH")
    return system, []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_listening(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server listens.

    A connection attempt would not do: the server takes the first connection for its client.
    """
    suffix = f":{port:04X}"
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and server.poll() is None:
        rows = (Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()).splitlines()
        # Columns of the kernel's table: number, local address, remote address, state (0A:
        # listening), ...
        if any(row.split()[1].endswith(suffix) and row.split()[3] == "0A" for row in rows):
            return
        time.sleep(0.01)
    raise ConfigError("ucx_perftest does not start to listen")
