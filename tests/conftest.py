"""Fixtures and hooks of the whole suite."""

import importlib.util
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from runtime.rpc.client import ChannelOptions
from runtime.rpc.server import ServerOptions

# Folders whose tests never load torch, which takes longer than most of them; tests/architecture
# holds it.
WITHOUT_TORCH = ("architecture", "baton", "router", "runtime")


def has_gpu() -> bool:
    """Return `torch.cuda.is_available()` without loading torch: a build for CUDA and a visible
    device."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    is_built_for_it = re.search(
        r"^cuda\b.*= '", Path(torch.origin).with_name("version.py").read_text(), re.MULTILINE
    )
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return is_built_for_it is not None and not is_hidden and any(Path("/dev").glob("nvidia[0-9]*"))


# Where there is no GPU, kernels run in Triton's interpreter: the same code, on the CPU. It must be
# chosen before the first of them is imported, by whatever test or conftest.py that is.
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

# Tests talk to processes on this machine, past any proxy that the environment names.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost,::1"

# What a shell starts in its background ignores SIGINT, and so do the processes it starts: tests
# interrupt some of them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No example is timed, because a busy machine may take any time for any of them; and the same tree
# gives the same examples. `--hypothesis-profile=search` looks for new ones.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("search"), derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _the_same_numbers() -> None:
    """Seed random numbers, independent of earlier tests on this worker."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen connection timeouts: both ends share this process, which may stall for seconds."""
    for options in (ServerOptions, ChannelOptions):
        monkeypatch.setattr(options, "as_grpc", _patient(options.as_grpc))


def _patient(as_grpc: Callable[..., list[tuple[str, Any]]]) -> Callable[..., list[tuple[str, Any]]]:
    timeouts = ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return lambda options: [
        (name, 60_000 if name in timeouts else value) for name, value in as_grpc(options)
    ]


def pytest_runtest_setup() -> None:
    """Leave tests out after the time (Unix, seconds) that `BATON_TESTS_UNTIL` states, and say so.

    A continuous integration that must end may be on a machine of half the usual speed.
    """
    until_s = float(os.environ.get("BATON_TESTS_UNTIL", "inf"))
    if time.time() > until_s:
        pytest.skip("the time for tests on this machine is over")


_STARTS_PROCESSES = ("tests/bench/", "tests/cluster/", "tests/deploy/")
_READS_SOURCES = ("tests/architecture/",)


class _OneWorkerForClusters(LoadScopeScheduling):  # type: ignore[misc]  # published without types
    """Any worker takes any test, but those that start whole clusters stay on one: two clusters at a
    time would wait for each other's cores. Those that parse all sources stay on one that has."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_READS_SOURCES):
            return "sources"
        return "processes" if nodeid.startswith(_STARTS_PROCESSES) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _OneWorkerForClusters(config, log)
