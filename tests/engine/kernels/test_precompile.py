"""Kernels are compiled by the first process that needs them, one each; a process waits only if no
kernel is left to compile."""

import fcntl
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numba
import pytest
import torch
from numba.core.caching import FunctionCache

from engine.core.numerics import WeightFormat
from engine.kernels.host.aot import precompile
from engine.kernels.host.aot.kernel_list import Kernel, ModelNeeds, kernels, kernels_of
from engine.kernels.host.aot.precompile import compile_ahead
from engine.kernels.host.codegen import compiled
from engine.kernels.host.codegen.compiled import (
    Attempt,
    KernelLockedError,
    KernelMissingError,
    compile_kernel,
    count_up,
    record,
    trying,
)
from engine.kernels.host.linear import packing
from engine.kernels.host.tokens import norm_rope
from runtime.process.child_process import program
from runtime.process.host_memory import HostMemory

FINDER = """
import logging
from engine.kernels.host.codegen.compiled import Attempt, KernelMissingError, trying
from engine.kernels.host.aot.kernel_list import kernels

logging.basicConfig(level="INFO")
for kernel in kernels():
    try:
        with trying(Attempt.LOAD):
            kernel.load()
    except KernelMissingError:
        print(kernel)
"""
MISSING, LOCKED, THERE = KernelMissingError(), KernelLockedError(), None


def scripted(name: str, calls: list[str], *outcomes: Exception | None) -> Kernel:
    """Return a kernel with the given result for each call, which appends its name to `calls`."""
    left = iter(outcomes)

    def load() -> None:
        calls.append(name)
        if (outcome := next(left)) is not None:
            raise outcome

    return Kernel(load)


class FakeHelper:
    """The used part of `subprocess.Popen`. `log` has the kernels of each and the calls made on
    it."""

    log: list[str]

    def __init__(self, command: Sequence[str], **options: object) -> None:
        self.log.append(command[-1])

    def kill(self) -> None:
        self.log.append("killed")

    def wait(self, timeout_s: float) -> None:
        self.log.append("gone")


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Kernel], int, int], list[str]]:
    """Return `helpers(all kernels, cores, free bytes)`, which yields the log of `FakeHelper`."""

    def prepared(every: Sequence[Kernel], num_cores: int, free: int) -> list[str]:
        FakeHelper.log = []
        monkeypatch.setattr(precompile, "kernels", lambda: iter(every))
        monkeypatch.setattr(precompile, "num_cores", lambda: num_cores)
        monkeypatch.setattr(precompile, "host_memory", lambda: HostMemory(free, free))
        monkeypatch.setattr(subprocess, "Popen", FakeHelper)
        return FakeHelper.log

    return prepared


def test_a_kernel_locked_by_another_process_is_waited_for_last() -> None:
    calls: list[str] = []
    compile_ahead(
        [
            scripted("a", calls, LOCKED, LOCKED, LOCKED, THERE),
            scripted("b", calls, LOCKED, THERE),
            scripted("c", calls, THERE),
        ]
    )
    assert "".join(calls) == "abcabaa", (
        "all that is kept; what is free; again; and then it is waited for"
    )


def test_kernels_unlocked_meanwhile_are_loaded_before_another_wait() -> None:
    calls: list[str] = []
    compile_ahead(
        [scripted("a", calls, LOCKED, LOCKED, THERE), scripted("b", calls, LOCKED, LOCKED, THERE)]
    )
    assert "".join(calls) == "ababab"


@pytest.mark.parametrize(
    ("cores", "room", "begin"),
    [(1, 99, []), (2, 99, ["1,2,0"]), (8, 99, ["1,2,0", "2,0,1"]), (8, 2, ["1,2,0"]), (8, 0, [])],
)
def test_helpers_are_bounded_by_cores_kernels_and_memory_and_all_end(
    helpers: Callable[..., list[str]], cores: int, room: int, begin: list[str]
) -> None:
    every = [scripted(name, [], MISSING, THERE) for name in "abc"]
    log = helpers(every, cores, room * precompile.PROCESS_BYTES)
    compile_ahead(every)
    assert log == [*begin, *["killed"] * len(begin), *["gone"] * len(begin)]


def test_how_many_are_there_is_reported_from_the_first_to_the_last(
    helpers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four kernels one is kept, one is compiled elsewhere first, and two are compiled here."""
    monkeypatch.setattr(precompile, "REPORT_S", 0.0)
    every = [
        scripted("a", [], THERE),
        scripted("b", [], MISSING, LOCKED, THERE),
        scripted("c", [], MISSING, THERE),
        scripted("d", [], MISSING, THERE),
    ]
    helpers(every, 1, 0)
    reports: list[tuple[int, int]] = []
    compile_ahead(every, lambda done, total: reports.append((done, total)))
    assert reports == [(0, 3), (0, 3), (1, 3), (2, 3), (3, 3), (3, 3)]
    reports.clear()
    compile_ahead([scripted("a", [], THERE)], lambda done, total: reports.append((done, total)))
    assert not reports


def test_cached_and_locked_kernels_start_no_helpers(helpers: Callable[..., list[str]]) -> None:
    every = [
        scripted("a", [], THERE),
        scripted("b", [], LOCKED, THERE),
        scripted("c", [], LOCKED, THERE),
    ]
    log = helpers(every, 8, 99 * precompile.PROCESS_BYTES)
    compile_ahead(every)
    assert not log


def test_a_failure_leaves_no_helper(helpers: Callable[..., list[str]]) -> None:
    every = [
        scripted("a", [], MISSING, ValueError("a fault of the code")),
        scripted("b", [], MISSING),
    ]
    log = helpers(every, 2, 99 * precompile.PROCESS_BYTES)
    with pytest.raises(ValueError, match="fault"):
        compile_ahead(every)
    assert log == ["1,0", "killed", "gone"]


def test_attempts_neither_wait_nor_compile_beyond_their_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(compiled, "LOCK_FILE", tmp_path / "lock")

    def load(attempt: Attempt) -> object:
        def work(pointer: object) -> None:
            count_up(pointer, compiled.DONE)

        with trying(attempt):
            return compile_kernel(work, record(), "counting")

    with (tmp_path / "lock").open("w") as other:
        whole = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, whole)
        for attempt in (Attempt.LOAD, Attempt.UNLOCKED):
            with pytest.raises(KernelLockedError):
                load(attempt)
    with pytest.raises(KernelMissingError):
        load(Attempt.LOAD)
    assert not list(tmp_path.rglob("*.nbi")), "nothing was compiled"
    assert load(Attempt.UNLOCKED)
    assert list(tmp_path.rglob("*.nbi"))

    def is_locked(*arguments: object, **options: object) -> object:
        raise AssertionError("a process that compiles into another cache may hold the lock")

    monkeypatch.setattr(compiled, "alone", is_locked)
    for attempt in Attempt:
        assert load(attempt).cache_hits == 1  # type: ignore[attr-defined]


def test_without_a_cache_folder_a_process_compiles_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really = numba.cfunc

    def keeping_nothing(*, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return really(**options)

    def work(pointer: object) -> None:
        count_up(pointer, compiled.DONE)

    monkeypatch.setattr(compiled, "cfunc", keeping_nothing)
    with trying(Attempt.LOAD), pytest.raises(KernelMissingError):
        compile_kernel(work, record(), "counting")
    with trying(Attempt.UNLOCKED):
        assert compile_kernel(work, record(), "counting").address


def test_without_a_cache_folder_one_warning_names_the_remedy(
    helpers: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No helper process compiles, since it could not pass its result on."""
    monkeypatch.setattr(
        FunctionCache._impl_class, "_locator_classes", []
    )  # numba's places for files: none
    calls: list[str] = []
    every = [scripted("a", calls, MISSING, THERE), scripted("b", calls, MISSING, THERE)]
    log = helpers(every, 8, 99 * precompile.PROCESS_BYTES)
    compile_ahead(every)
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert line.startswith("compiled kernels cannot be kept, so every start compiles them: ")
    assert "NUMBA_CACHE_DIR" in line
    assert (calls, log) == (["a", "b", "a", "b"], [])


def test_kernels_are_cached_in_numbas_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    folder = compiled.kept_in()
    assert folder is not None
    assert folder.is_relative_to(tmp_path)


def test_a_helper_compiles_the_requested_kernels(tmp_path: Path) -> None:
    wanted = [
        Kernel(packing.compiled),
        Kernel(norm_rope.norm_for, (torch.float32, torch.float32, False)),
    ]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    subprocess.run(
        program(precompile.__name__, str(os.getpid()), precompile._places(wanted)),
        check=True,
        env=environment,
    )
    assert sorted(path.name.partition(".")[0] for path in tmp_path.rglob("*.nbi")) == [
        "norm_rope",
        "packing",
    ]


def test_those_of_a_model_are_among_all() -> None:
    every = list(kernels())
    for dtype, weight_format, flags in itertools.product(
        (torch.bfloat16, torch.float32),
        WeightFormat,
        itertools.product((False, True), repeat=5),
    ):
        reads, attends, latent, selects, recurs = flags
        needs = ModelNeeds(
            dtype,
            reads_prompts=reads,
            attends=attends,
            attends_latent=latent,
            selects_keys=selects,
            has_states=recurs,
            weight_format=weight_format,
        )
        assert all(kernel in every for kernel in kernels_of(needs))
    assert not list(kernels_of(ModelNeeds(torch.float16, reads_prompts=True, attends=True)))


@pytest.mark.long
def test_kernels_compiled_by_one_process_are_found_by_others() -> None:
    for kernel in kernels():
        kernel.load()
    found = subprocess.run(
        [sys.executable, "-c", FINDER], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
