"""Whether to wait for the next frame awake: to be woken costs more than most waits between stages that are busy."""

import time
from collections import deque
from collections.abc import Callable

LEAST_S = 50e-6
LONGEST_S = 20e-3  # what a sleeper loses of a longer wait does not count
NUM_WAITS = 8  # count: the stages of a pool wait for each other in turn, now long, now not at all
ROOM = 2  # a wait may take so many times the longest of them
SHARED_CORE_S = 30e-6  # a core that others hold so long is needed by them: who sleeps there is woken sooner
SHARED_FOR_S = 0.1


class Vigil:
    """The waits of one stage for what is not there yet. While batches are in flight waits are short, and a stage stays
    awake for as long as the last ones took; where none comes any more, or other processes want the core, it sleeps.

        vigil.begin()
        while nothing has come:
            yield the core if vigil.lasts() else sleep
        vigil.rewarded()                                     # or vigil.in_vain()
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic,
                 cpu_clock: Callable[[], float] = time.process_time) -> None:
        """`cpu_clock`: seconds of cores that the threads of this process have had, together."""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._waits_s: deque[float] = deque(maxlen=NUM_WAITS)
        self._began_s = self._began_cpu_s = self._looked_s = self._until_s = self._shared_until_s = 0.0

    def begin(self) -> None:
        self._began_s = self._looked_s = self._clock()
        self._began_cpu_s = self._cpu_clock()
        self._until_s = self._began_s + max(LEAST_S, ROOM * max(self._waits_s, default=0.0))

    def lasts(self) -> bool:
        """Whether to stay awake; to be asked between two looks for a frame."""
        now = self._clock()
        if now - self._looked_s > SHARED_CORE_S:
            others_s = now - self._began_s - (self._cpu_clock() - self._began_cpu_s)  # not this process's threads
            if others_s > SHARED_CORE_S:
                self._shared_until_s = now + SHARED_FOR_S
        self._looked_s = now
        return self._shared_until_s <= now < self._until_s

    def rewarded(self) -> None:
        """What was waited for is here."""
        waited_s = self._clock() - self._began_s
        if waited_s <= LONGEST_S:
            self._waits_s.append(waited_s)

    def in_vain(self) -> None:
        """It did not come in time: the stages are idle."""
        self._waits_s.clear()
