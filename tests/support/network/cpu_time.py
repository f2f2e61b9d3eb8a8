"""How much CPU time a wait takes of the thread that waits."""

import time
from collections.abc import Callable


def least_cpu_s(wait: Callable[[], object], turns: int = 3) -> float:
    """Return the CPU seconds of the cheapest of `turns`.

    Polling costs time in every turn. A garbage collection in one of them takes tenths of a second
    in a process that has run thousands of tests, and is not caused by the wait.
    """
    least_s = float("inf")
    for _ in range(turns):
        began_s = time.thread_time()
        wait()
        least_s = min(least_s, time.thread_time() - began_s)
    return least_s
