"""How long a stage stays awake for what is not there yet."""

import time
from collections import deque
from collections.abc import Callable

LEAST_S = 50e-6
LONGEST_S = 20e-3  # what a sleeper loses of a longer wait does not count
NUM_WAITS = 8  # count: the stages of a pool wait for each other in turn, now long, now not at all
ROOM = 2  # a wait may take so many times the longest of them
HELD_UP_S = 30e-6  # between two looks: somebody else had the core
OTHERS_SHARE, OTHERS_S = (
    0.1,
    1e-3,
)  # of a core, and at once: what has more needs it; a kernel or a host takes less
SHARED_FOR_S = 0.1  # who shares a core sleeps, and is woken sooner


class SpinThenSleep:
    """The waits of one stage for what is not there yet. While batches are in flight waits are
    short, and a stage stays awake for as long as the last ones took; where none comes any more, or
    other processes want the core, it sleeps.

        vigil.begin()
        while nothing has come:
            yield the core if vigil.lasts() else sleep
        vigil.rewarded()                                     # or vigil.in_vain()
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """`cpu_clock`: seconds of cores that the threads of this process have had, together."""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._waits_s: deque[float] = deque(maxlen=NUM_WAITS)
        self._began_s = self._looked_s = self._until_s = self._shared_until_s = 0.0
        self._counted_s = self._counted_cpu_s = 0.0  # where others' time was last added up
        self._others_s = self._others_at_s = 0.0  # what they had beyond their share, and when

    def begin(self) -> None:
        self._began_s = self._looked_s = self._counted_s = self._clock()
        self._counted_cpu_s = self._cpu_clock()
        self._until_s = self._began_s + max(LEAST_S, ROOM * max(self._waits_s, default=0.0))

    def lasts(self) -> bool:
        """Whether to stay awake; to be asked between two looks for a frame."""
        now = self._clock()
        if now - self._looked_s > HELD_UP_S:
            self._count_others(now)
        self._looked_s = now
        return self._shared_until_s <= now < self._until_s

    def _count_others(self, now: float) -> None:
        """Add what the threads of this process have not had of the core."""
        cpu_s = self._cpu_clock()
        others_s = now - self._counted_s - (cpu_s - self._counted_cpu_s)
        self._counted_s, self._counted_cpu_s = now, cpu_s
        self._others_s = others_s + max(
            0.0, self._others_s - OTHERS_SHARE * (now - self._others_at_s)
        )
        self._others_at_s = now
        if self._others_s > OTHERS_S:
            self._shared_until_s = now + SHARED_FOR_S

    def succeeded(self) -> None:
        """What was waited for is here."""
        waited_s = self._clock() - self._began_s
        if waited_s <= LONGEST_S:
            self._waits_s.append(waited_s)

    def timed_out(self) -> None:
        """It did not come in time: the stages are idle."""
        self._waits_s.clear()
