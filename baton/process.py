"""One role process of a local cluster: started, watched, restarted under its old address,
stopped."""

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
from runtime.process.start_progress import kernel_progress
from runtime.process.supervision import EXIT_CONFIG

# Called with the process's name and one line of its output.
LogSink = Callable[[str, str], None]
# Returns when the process that announced itself so serves; raises BatonError when that cannot be
# found out.
UntilServing = Callable[[Announcement], Awaitable[None]]

_FIRST_BACKOFF_S, _LAST_BACKOFF_S = (
    0.1,
    10.0,
)  # pauses grow from death to death, until the process has served
_REAP_S = 5.0  # a killed process to its end
_LOOK_S = 0.02  # between two looks at the announcement: a file has no event to wait for


@dataclass(frozen=True)
class ProcessSpec:
    """`arguments` are the role's flags without those about its own addresses, which the restart
    logic owns."""

    name: str  # "decode-0.1": pool 0, stage 1
    role: str  # the module to run
    arguments: tuple[str, ...]
    listen: str
    cores: tuple[int, ...] | None  # that it keeps to; None for all
    announce: Path
    leads: bool  # the process whose health stands for its pool
    metrics_port: int = 0  # 0: any


class RoleProcess:
    """`run` is the life of the process over all its restarts; everything else may be called beside
    it.

    Until `settle` is called an exit is an error: a process that cannot start is not worth a second
    try. One that had served is started again almost at once; where it dies before it serves, pauses
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
        self._has_served = False  # in its present life
        self._kernels = ""  # how far it is with them
        self._child: Child | None = None
        self._announcement: Announcement | None = None
        self._tail: deque[str] = deque(maxlen=20)
        self._settled = False
        self._stopping = False
        self._restarting = False
        self._num_starts = 0
        self._num_oom_kills = 0  # of this machine when the child started

    @property
    def pid(self) -> int | None:
        """Of the child that runs now; None between two runs."""
        return (
            self._child.pid if self._child is not None and self._child.returncode is None else None
        )

    @property
    def progress(self) -> str:
        """Return how far its present life has come, in a word or two."""
        if self._has_served:
            return "serves"
        return "warms up" if self.spec.announce.exists() else self._kernels or "loads"

    @property
    def has_served(self) -> bool:
        """Whether it serves, or has served, in its present life."""
        return self._has_served

    @property
    def num_starts(self) -> int:
        return self._num_starts

    @property
    def announcement(self) -> Announcement | None:
        """Where it listens; stays the same over restarts."""
        return self._announcement

    def settle(self) -> None:
        """From now on a death is followed by a restart."""
        self._settled = True

    async def run(self) -> None:
        """Start, and start again after each death.

        Raises:
            ConfigError: it refused its settings before `settle`.
            UnavailableError: it ended otherwise before `settle`; the message has its last line, as
                that of the other.
        """
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping:
            code = await self._run_once()
            if self._stopping:
                return
            if self._restarting:
                self._restarting, backoff_s = False, _FIRST_BACKOFF_S
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
        """The first announcement. Raises DeadlineError when there is none in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._listens():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        if self._announcement is None:
            raise DeadlineError(
                f"{self.spec.name} has not said where it listens after {timeout_s:.0f} s"
            )
        return self._announcement

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to its whole group when the time is up."""
        self._stopping = True
        await self._end(grace_s)

    async def restart(self, *, grace_s: float) -> None:
        """Stop it as an operator would, and start it again under its old address at once. Returns
        when the old child is gone."""
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
        """End it for good, at once. The last resort."""
        self._stopping = True
        self.kill()

    def kill(self) -> None:
        """The process and its children die, as they might by themselves."""
        if self._child is not None:
            _kill(self._child)

    def _listens(self) -> bool:
        self._announcement = self._announcement or read_announcement(self.spec.announce)
        return self._announcement is not None

    async def _run_once(self) -> int:
        self._listens()  # where the last run did, so that this one does too
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
        if self._stopping:  # stopped while the child was being made
            self.kill()
        self._has_served, self._kernels = False, ""
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
            except ValueError:  # longer than the limit; its remains follow as lines of their own
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            self._kernels = kernel_progress(text) or self._kernels
            # The line that a process ends on is shown once: before `settle` in the error of `run`.
            if self._settled or not message_of(text).startswith(self._own_prefix):
                self._sink(self.spec.name, text)

    @property
    def _own_prefix(self) -> str:
        """What the line begins with in which a role reports why it ends
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
        line = next((line for line in reversed(self._tail) if line), "it said nothing")
        return message_of(line).removeprefix(self._own_prefix)


def _kill(child: Child) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
