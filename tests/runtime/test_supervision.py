import asyncio
import os
import signal
import subprocess
import sys

import pytest

from runtime.errors import BatonError, ConfigError, InternalError, UnavailableError
from runtime.process.supervision import StopSignal, background, interruptible, run_process


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (None, 0, ""),
        (ConfigError("no such folder: x", field="model"), 2, "prefill: no such folder: x\n"),
        (UnavailableError("no worker"), 1, "prefill: no worker\n"),
        (
            ExceptionGroup("many", [ExceptionGroup("", [UnavailableError("inner")])]),
            1,
            "prefill: inner\n",
        ),
    ],
)
def test_exit_codes(
    error: BatonError | None, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(stop: StopSignal) -> None:
        if error is not None:
            raise error

    assert run_process("prefill", run) == code
    assert capsys.readouterr().err == says


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), InternalError("x")])
def test_bugs_exit_70_with_their_traceback(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(stop: StopSignal) -> None:
        raise error

    assert run_process("prefill", run) == 70
    assert any(record.exc_info for record in caplog.records if record.name.startswith("runtime."))


def test_sigterm_stops_in_order() -> None:
    seen: list[str] = []

    async def run(stop: StopSignal) -> None:
        async with background(stop, asyncio.sleep(60)):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.wait(), 30)
            seen.append(stop.reason)

    assert run_process("prefill", run) == 0
    assert seen == ["SIGTERM"]


def test_failing_background_work_stops_the_process() -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise UnavailableError("the leader is gone")

    async def run(stop: StopSignal) -> None:
        async with background(stop, fail(), asyncio.sleep(60)):
            await asyncio.wait_for(stop.wait(), 30)

    assert run_process("prefill", run) == 1


def test_second_signal_does_not_wait() -> None:
    script = (
        "import asyncio, sys\n"
        "from runtime.process.supervision import run_process\n"
        "async def run(stop):\n"
        "    print('up', flush=True)\n"
        "    await stop.wait()\n"
        "    print('draining', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "sys.exit(run_process('x', run))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "draining\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 1


def test_a_second_signal_interrupts_the_stopping_once() -> None:
    """A process that is killed in the end has to be waited for, and its pipes closed: a traceback
    followed."""
    seen: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            try:
                seen.append("stopping")
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.02)
                seen.append("ended")

    async def run(stop: StopSignal) -> None:
        await interruptible(stop, work())

    assert run_process("baton up", run) == 1
    assert seen == ["stopping", "ended"]
