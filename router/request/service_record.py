"""What one request shows of the pools that serve it, for those that come after it."""

from router.request.outlook import Outlook
from router.workers.worker import Booking


class ServiceRecord:
    """From being given to a pair of workers to the end. A request that moves shows nothing: it was served twice."""

    def __init__(self, outlook: Outlook, max_tokens: int, estimated_s: float) -> None:
        """`estimated_s`: how long it should take."""
        self._outlook = outlook
        self._max_tokens = max_tokens
        self._estimated_s = estimated_s
        self._since_s = outlook.clock.now()
        self._pool: Booking | None = None
        self._committed_s = 0.0
        self._num_drawn = 0
        self._has_moved = False

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """The worker says how long it computed the prompt."""
        self._outlook.best_prefill.observe(num_tokens, seconds)

    def committed(self, pool: Booking) -> None:
        """The decode pool begins."""
        pool.began()
        self._pool, self._committed_s = pool, self._outlook.clock.now()

    def drew(self, num_tokens: int) -> None:
        """The decode pool did."""
        self._num_drawn += num_tokens

    def moved(self) -> None:
        """It goes on elsewhere."""
        self._has_moved = True

    def ended(self, num_tokens: int) -> None:
        """With an answer of so many tokens."""
        if num_tokens:
            self._outlook.lengths.observe(self._max_tokens, num_tokens)
        self._note()

    def finished(self, decode_s: float) -> None:
        """The decode pool says that it took so long; its memory is free."""
        if self._pool is None:
            return
        self._pool.finished()
        if not self._has_moved:
            self._pool.answered(self._num_drawn, decode_s)
        self._pool = None  # `cut_off` adds nothing

    def cut_off(self) -> None:
        """At its deadline: it would have taken at least this long."""
        if self._pool is not None and not self._has_moved:
            self._pool.answered(self._num_drawn, self._outlook.clock.now() - self._committed_s)
        self._note()

    def _note(self) -> None:
        if not self._has_moved:
            self._outlook.caution.observe(self._estimated_s, self._outlook.clock.now() - self._since_s)
