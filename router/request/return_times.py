"""When clients may come again with requests that found the queue full."""

from router.request.demand import MAX_RETRY_S
from runtime.clock import Clock

# More come than places are expected to be free, because what is expected is an estimate.
OVERBOOKING = 2.0
MAX_CLIENTS = 1024


class ReturnTimes:
    """Retry delays that spread the requests of a client over the places that become free.

    With the same delay all of them would come when there is room for a few, and be rejected again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest_s: dict[str, float] = {}  # by client; those in the past have no effect

    def delay_s(self, client: str, delay_s: float, place_s: float) -> float:
        """Return the delay of a request, at least `delay_s` and at most `MAX_RETRY_S`.

        `place_s` is the time in which one place becomes free.
        """
        now_s = self._clock.now()
        after_s = self._latest_s.get(client, now_s) + place_s / OVERBOOKING
        at_s = max(now_s + delay_s, min(after_s, now_s + MAX_RETRY_S))
        self._latest_s[client] = at_s
        if len(self._latest_s) > MAX_CLIENTS:
            self._latest_s = {
                name: latest_s for name, latest_s in self._latest_s.items() if latest_s > now_s
            }
        return at_s - now_s
