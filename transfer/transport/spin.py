"""Spin-then-sleep waiting of a stage, with an adaptive spin time, and naps if UCX is restless."""

import time
from collections import deque
from collections.abc import Callable

LEAST_S = 50e-6
LONGEST_S = 20e-3  # longer waits are not counted: sleeping costs little in comparison
# number of recent waits: the stages of a pool wait for each other in turn, long and short
NUM_WAITS = 8
ROOM = 2  # spin limit as a multiple of the longest recent wait
PREEMPTED_S = 30e-6  # a larger gap between two checks means that another thread had the core
# Share of a core, and CPU time at once, of other processes. More means that they need the core; a
# kernel or a host uses less.
OTHERS_SHARE = 0.1
OTHERS_S = 1e-3
SHARED_FOR_S = 0.1  # time without spinning once a core is shared: a sleeper is woken sooner

# Number of successive rounds in which UCX reports work but has none.
RESTLESS_ROUNDS = 16
RESTLESS_NAP_S = 2e-3


class SpinThenSleep:
    """Decision between spinning and sleeping in the waits of one stage.

    While batches are in flight waits are short, and a stage spins for about as long as the last
    waits took. It sleeps if nothing arrives any more or other processes need the core.

        spinner.begin()
        while nothing has arrived:
            yield the core if spinner.lasts() else sleep
        spinner.succeeded()                                  # or spinner.timed_out()
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Create the state; `cpu_clock` returns the CPU seconds of all threads of this process."""
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._waits_s: deque[float] = deque(maxlen=NUM_WAITS)
        self._began_s = self._looked_s = self._until_s = self._shared_until_s = 0.0
        self._counted_s = self._counted_cpu_s = 0.0  # last update of the other processes' time
        # excess of other processes over their share, and its time
        self._others_s = self._others_at_s = 0.0

    def begin(self) -> None:
        self._began_s = self._looked_s = self._counted_s = self._clock()
        self._counted_cpu_s = self._cpu_clock()
        self._until_s = self._began_s + max(LEAST_S, ROOM * max(self._waits_s, default=0.0))

    def lasts(self) -> bool:
        """Return whether to continue to spin; call it between two checks for a frame."""
        now = self._clock()
        if now - self._looked_s > PREEMPTED_S:
            self._count_others(now)
        self._looked_s = now
        return self._shared_until_s <= now < self._until_s

    def _count_others(self, now: float) -> None:
        """Add the time in which the threads of this process did not have the core."""
        cpu_s = self._cpu_clock()
        others_s = now - self._counted_s - (cpu_s - self._counted_cpu_s)
        self._counted_s = now
        self._counted_cpu_s = cpu_s
        self._others_s = others_s + max(
            0.0, self._others_s - OTHERS_SHARE * (now - self._others_at_s)
        )
        self._others_at_s = now
        if self._others_s > OTHERS_S:
            self._shared_until_s = now + SHARED_FOR_S

    def succeeded(self) -> None:
        """Record the duration of a successful wait."""
        waited_s = self._clock() - self._began_s
        if waited_s <= LONGEST_S:
            self._waits_s.append(waited_s)

    def timed_out(self) -> None:
        """Forget recent waits: nothing arrived in time, so the stages are idle."""
        self._waits_s.clear()


class RestlessRounds:
    """The rounds of one wait in which UCX reports work but has none.

    Over TCP an unresponsive peer's connection keeps UCX's descriptor readable all the time.
    """

    def __init__(self) -> None:
        self._num_rounds = 0

    @property
    def is_nap_due(self) -> bool:
        return self._num_rounds >= RESTLESS_ROUNDS

    def add(self) -> None:
        self._num_rounds += 1

    def clear(self) -> None:
        """Begin to count again, because UCX had work."""
        self._num_rounds = 0

    def nap(self, longest_s: float) -> None:
        """Sleep without listening to UCX."""
        time.sleep(min(RESTLESS_NAP_S, longest_s))
        # Allow one more round only: sixteen rounds take as long as the nap.
        self._num_rounds = RESTLESS_ROUNDS - 1
