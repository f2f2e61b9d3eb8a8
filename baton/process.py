"""One role process of a local cluster: start, supervision, restart at the same address, stop."""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from baton.fork_server import Child, Spawn, spawn
from runtime.errors import BatonError, ConfigError, DeadlineError, UnavailableError
from runtime.observe.log import LogStyle, message_of, styled_line
from runtime.process.announce import Announcement, read_announcement
from runtime.process.child_process import ALL_CORES
from runtime.process.host_memory import num_oom_kills
from runtime.process.start_progress import start_progress
from runtime.process.supervision import EXIT_CONFIG

# Called with the name of the process and one line of its output.
LogSink = Callable[[str, str], None]
# Returns when the announced process serves; raises BatonError if that cannot be determined.
UntilServing = Callable[[Announcement], Awaitable[None]]

_FIRST_BACKOFF_S, _LAST_BACKOFF_S = (
    0.1,
    10.0,
)  # pauses grow from failure to failure until the process has served
_REAP_S = 5.0  # for a killed process to exit
_LOOK_S = 0.02  # between two looks at the announcement; a file has no event to await


@dataclass(frozen=True)
class ProcessSpec:
    """Command of a role process.

    `arguments` are the flags of the role, without its own addresses; `RoleProcess` adds those.
    """

    name: str  # "decode-0.1" is pool 0, stage 1
    role: str  # module to run
    arguments: tuple[str, ...]
    listen: str
    cores: tuple[int, ...] | None  # cores to run on; None: all
    announce: Path
    leads: bool  # whether its health represents the pool
    metrics_port: int = 0  # 0: any


class RoleProcess:
    """One role process over all its restarts.

    `run` supervises the process; every other method may be called while it runs.

    Until `settle` is called, an exit is an error: a process that cannot start is not retried. A
    process that had served is restarted almost at once. If it dies before it serves, the pauses
    grow.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        sink: LogSink,
        until_serving: UntilServing,
        spawn: Spawn = spawn,
        *,
        log_style: LogStyle = LogStyle.HUMAN,
    ) -> None:
        self.spec = spec
        self._sink = sink
        self._spawn = spawn
        self._log_style = log_style  # of the lines about the process
        self._until_serving = until_serving
        self._has_served = False  # since its last start
        self._progress = ""  # as its log lines report it
        self._child: Child | None = None
        self._announcement: Announcement | None = None
        self._tail: deque[str] = deque(maxlen=20)
        self._settled = False
        self._stopping = False
        self._restarting = False
        self._num_starts = 0
        self._num_oom_kills = 0  # on this machine, when the child started

    @property
    def pid(self) -> int | None:
        """Return the process id of the running child, or None between two runs."""
        return (
            self._child.pid if self._child is not None and self._child.returncode is None else None
        )

    @property
    def progress(self) -> str:
        """Return the state of the current run in one or two words."""
        if self._has_served:
            return "serves"
        return "warms up" if self.spec.announce.exists() else self._progress or "loads"

    @property
    def has_served(self) -> bool:
        """Return whether the process has served since its last start."""
        return self._has_served

    @property
    def num_starts(self) -> int:
        return self._num_starts

    @property
    def announcement(self) -> Announcement | None:
        """Return the addresses of the process; they stay the same over restarts."""
        return self._announcement

    def settle(self) -> None:
        """Restart the process whenever it dies from now on."""
        self._settled = True

    async def run(self) -> None:
        """Start the process, and restart it each time it dies.

        Raises:
            ConfigError: the process rejected its settings before `settle`.
            UnavailableError: the process ended for another reason before `settle`.

        Both messages contain the last line of the process.
        """
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping:
            code = await self._run_once()
            if self._stopping:
                return
            if self._restarting:
                self._restarting = False
                backoff_s = _FIRST_BACKOFF_S
                continue
            if not self._settled:
                message = f"{self.spec.name} {self._ending(code)}: {self._last_words()}"
                raise (
                    ConfigError(message, field=self.spec.role)
                    if code == EXIT_CONFIG
                    else UnavailableError(message)
                )
            if self._has_served:
                backoff_s = _FIRST_BACKOFF_S
            self._sink(
                self.spec.name,
                styled_line(
                    self._log_style,
                    f"{self._ending(code)}, starting again in {backoff_s:g} s",
                    role="baton",
                    level="warning",
                ),
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _LAST_BACKOFF_S)

    async def announced(self, *, timeout_s: float) -> Announcement:
        """Return the first announcement.

        Raises:
            DeadlineError: there is none after `timeout_s`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._listens():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        if self._announcement is None:
            raise DeadlineError(
                f"{self.spec.name} has not announced its address after {timeout_s:.0f} s"
            )
        return self._announcement

    async def stop(self, *, grace_s: float) -> None:
        """Send SIGTERM; after `grace_s`, send SIGKILL to the process group."""
        self._stopping = True
        await self._end(grace_s)

    async def restart(self, *, grace_s: float) -> None:
        """Stop the process as an operator would and restart it at its old address.

        Return when the old child has exited.
        """
        self._restarting = True
        await self._end(grace_s)

    async def _end(self, grace_s: float) -> None:
        child = self._child
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), grace_s)
        _kill(child)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), _REAP_S)

    def end(self) -> None:
        """Kill the process at once and do not restart it (the last resort)."""
        self._stopping = True
        self.kill()

    def kill(self) -> None:
        """Kill the process and its children, as a crash would."""
        if self._child is not None:
            _kill(self._child)

    def _listens(self) -> bool:
        self._announcement = self._announcement or read_announcement(self.spec.announce)
        return self._announcement is not None

    async def _run_once(self) -> int:
        self._listens()  # restart at the address of the last run
        self.spec.announce.unlink(missing_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        core = ALL_CORES if self.spec.cores is None else ",".join(map(str, self.spec.cores))
        self._child = await self._spawn(
            self.spec.role,
            (*self.spec.arguments, *self._own_addresses()),
            core=core,
            environment=environment,
        )
        self._num_starts += 1
        self._num_oom_kills = num_oom_kills()
        if self._stopping:  # stopped while the child was being created
            self.kill()
        self._has_served = False
        self._progress = ""
        watching = asyncio.create_task(self._watch_until_serving())
        try:
            assert self._child.stdout is not None
            await self._pass_on(self._child.stdout)
            return await self._child.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch_until_serving(self) -> None:
        while (announcement := read_announcement(self.spec.announce)) is None:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        with contextlib.suppress(BatonError):
            await self._until_serving(announcement)
            self._has_served = True

    def _own_addresses(self) -> tuple[str, ...]:
        known = self._announcement
        listen = self.spec.listen if known is None else known.address
        port = (
            self.spec.metrics_port
            if known is None or known.metrics_port is None
            else known.metrics_port
        )
        return (
            "--listen",
            listen,
            "--metrics-port",
            str(port),
            "--announce",
            str(self.spec.announce),
        )

    async def _pass_on(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await output.readline()
            except ValueError:  # a line over the limit; the rest follows as further lines
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            self._progress = start_progress(text) or self._progress
            # Show the last line of a process once: before `settle` it is in the error of `run`.
            if self._settled or not message_of(text).startswith(self._own_prefix):
                self._sink(self.spec.name, text)

    @property
    def _own_prefix(self) -> str:
        """Return the prefix of the line in which a role reports why it ends
        (`runtime.process.supervision`)."""
        return f"{self.spec.role}: "

    def _ending(self, code: int) -> str:
        if code >= 0:
            return f"ended with exit code {code}"
        by_kernel = code == -signal.SIGKILL and num_oom_kills() > self._num_oom_kills
        return f"was ended by {signal.Signals(-code).name}" + (
            ", because memory ran out" if by_kernel else ""
        )

    def _last_words(self) -> str:
        line = next((line for line in reversed(self._tail) if line), "no output")
        return message_of(line).removeprefix(self._own_prefix)


def _kill(child: Child) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
