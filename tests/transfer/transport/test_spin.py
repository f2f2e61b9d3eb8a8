"""A wait for a frame spins while batches are in flight, and at no other time."""

from dataclasses import dataclass, field

import pytest

from transfer.transport.spin import LEAST_S, LONGEST_S, NUM_WAITS, SHARED_FOR_S, SpinThenSleep

LOOK_S = 10e-6


@dataclass
class Core:
    """One stage on a core of its own: what passes, it has had, unless others had it."""

    now_s: float = 100.0
    cpu_s: float = 5.0
    spin: SpinThenSleep = field(init=False)

    def __post_init__(self) -> None:
        self.spin = SpinThenSleep(clock=lambda: self.now_s, cpu_clock=lambda: self.cpu_s)

    def run(self, seconds: float) -> None:
        self.now_s += seconds
        self.cpu_s += seconds

    def taken(self, seconds: float) -> None:
        """Simulate another process on the core."""
        self.now_s += seconds

    def awake_s(self, limit_s: float) -> float:
        """Return the time until it sleeps, at most `limit_s`."""
        began_s = self.now_s
        while self.now_s - began_s < limit_s and self.spin.lasts():
            self.run(LOOK_S)
        return self.now_s - began_s

    def wait(self, seconds: float) -> float:
        """Wait for a frame that then arrives; return how long it was awake."""
        self.spin.begin()
        awake_s = self.awake_s(seconds)
        self.taken(seconds - awake_s)  # asleep
        self.spin.succeeded()
        return awake_s


@pytest.fixture
def core() -> Core:
    return Core()


def test_without_frames_of_late_it_soon_sleeps(core: Core) -> None:
    assert core.wait(1.0) == pytest.approx(LEAST_S, abs=2 * LOOK_S)
    assert core.wait(0.003) == pytest.approx(LEAST_S, abs=2 * LOOK_S)


def test_it_spins_for_as_long_as_the_last_waits_took(core: Core) -> None:
    core.wait(0.003)
    assert core.wait(0.005) == pytest.approx(0.005)
    assert core.wait(1.0) == pytest.approx(0.010, abs=2 * LOOK_S)


def test_a_short_wait_does_not_make_it_sleep_in_the_next_one(core: Core) -> None:
    core.wait(0.004)
    for _ in range(NUM_WAITS - 1):
        core.wait(10e-6)
    assert core.wait(0.004) == pytest.approx(0.004)


def test_many_short_waits_end_long_vigils(core: Core) -> None:
    core.wait(0.004)
    for _ in range(NUM_WAITS):
        core.wait(10e-6)
    assert core.wait(0.004) == pytest.approx(LEAST_S, abs=2 * LOOK_S)


def test_steps_so_long_that_waking_does_not_count_are_slept_through(core: Core) -> None:
    for _ in range(NUM_WAITS):
        assert core.wait(2 * LONGEST_S) == pytest.approx(LEAST_S, abs=2 * LOOK_S)


def test_once_idle_it_does_not_spin_again(core: Core) -> None:
    core.wait(0.004)
    core.spin.begin()
    core.awake_s(1.0)
    core.spin.timed_out()
    core.spin.begin()
    assert core.awake_s(1.0) == pytest.approx(LEAST_S, abs=2 * LOOK_S)


def test_it_gives_a_core_up_that_other_processes_want(core: Core) -> None:
    core.wait(0.004)
    core.spin.begin()
    assert core.spin.lasts()
    core.taken(0.003)
    assert not core.spin.lasts()
    core.now_s += SHARED_FOR_S / 2
    core.spin.begin()
    assert not core.spin.lasts()
    core.now_s += SHARED_FOR_S
    core.spin.begin()
    assert core.spin.lasts()


def test_a_core_that_is_only_interrupted_now_and_then_is_not_shared(core: Core) -> None:
    for _ in range(1000):
        core.run(0.002)
        core.wait(0.0005)
        core.spin.begin()
        assert core.spin.lasts()
        core.taken(0.00015)  # the host, or an interrupt
        assert core.spin.lasts()
        core.spin.succeeded()


def test_a_core_of_which_others_have_a_part_again_and_again_is_shared(core: Core) -> None:
    core.wait(0.004)
    lasted = []
    for _ in range(20):
        core.spin.begin()
        core.spin.lasts()
        core.taken(0.0002)
        lasted.append(core.spin.lasts())
        core.run(0.0002)
    assert lasted[0]
    assert not lasted[-1]


def test_its_own_threads_on_the_same_core_are_no_reason_to_sleep(core: Core) -> None:
    core.wait(0.004)
    core.spin.begin()
    assert core.spin.lasts()
    core.run(0.001)  # the event loop writes what the last step drew
    assert core.spin.lasts()
