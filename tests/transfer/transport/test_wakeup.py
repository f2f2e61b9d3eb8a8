"""A wakeup sleeps while it is not set, for any order of its calls."""

import os
import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from transfer.transport.protocol import Wakeup

BESIDE_S = (
    0.2  # for a call that is free to end to do so; one that has to wait for the other waits as long
)


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    wakeup = Wakeup()
    yield wakeup
    wakeup.close()


def is_readable(wakeup: Wakeup) -> bool:
    poll = select.poll()
    poll.register(wakeup._fd, select.POLLIN)
    return bool(poll.poll(0))


class Beside:
    """Runs `call` in a thread of its own, once, when it is called; goes on when that has ended or
    has to wait."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=call)

    def __call__(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
            self._thread.join(BESIDE_S)

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_set_ends_a_sleep_and_clear_ends_that(wakeup: Wakeup) -> None:
    timer = threading.Timer(0.1, wakeup.set)
    timer.start()
    started = time.monotonic()
    wakeup.sleep(60)
    assert time.monotonic() - started < 30
    timer.join()
    assert wakeup.is_set
    wakeup.clear()
    assert not wakeup.is_set
    assert not is_readable(wakeup)


def test_a_clear_between_the_two_halves_of_set_leaves_nothing(
    wakeup: Wakeup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag is up, nothing is written yet, and the owner clears."""
    write, clear = os.eventfd_write, Beside(wakeup.clear)

    def write_late(fd: int, value: int) -> None:
        clear()
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)
    wakeup.set()
    clear.end()
    assert is_readable(wakeup) == wakeup.is_set


def test_a_set_between_the_two_halves_of_clear_leaves_nothing(
    wakeup: Wakeup, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, set_again = os.eventfd_read, Beside(wakeup.set)

    def read_between(fd: int) -> int:
        set_again()
        try:
            return read(fd)
        finally:
            set_again()

    monkeypatch.setattr(os, "eventfd_read", read_between)
    wakeup.set()
    wakeup.clear()
    set_again.end()
    assert is_readable(wakeup) == wakeup.is_set


def test_concurrent_sets_and_clears_leave_a_consistent_descriptor(wakeup: Wakeup) -> None:
    def set_often() -> None:
        for _ in range(2000):
            wakeup.set()

    setters = [threading.Thread(target=set_often) for _ in range(2)]
    for setter in setters:
        setter.start()
    while any(setter.is_alive() for setter in setters):
        wakeup.wait(0.001)
    assert is_readable(wakeup) == wakeup.is_set
    wakeup.clear()
    assert not is_readable(wakeup)
