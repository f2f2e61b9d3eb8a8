"""Rejected messages: reasons, counts, and a rate-limited log line."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0


class RefusalReason(StrEnum):
    """Reason to reject a message. The values are labels of a metric."""

    # The tag is unknown to this process: of a stranger, of another pool, or of a future forming.
    FOREIGN = "foreign"
    EARLIER = "earlier"  # of an earlier forming of this pool
    CROSSED = "crossed"  # of this forming, but between other members or in the opposite direction
    REPLAYED = "replayed"  # authentic, but already received
    SKIPPED = "skipped"  # authentic, but earlier messages did not arrive
    DAMAGED = "damaged"  # the right tag, but the wrong authenticator
    OVERSIZED = "oversized"  # longer than any valid message, or one too many
    LATE = "late"  # for an epoch of a handoff that is over
    # For a receive of an open handoff that already has its message, or is cancelled.
    REPEATED = "repeated"


class Refusals:
    """Counters of rejected messages of one channel.

    Belongs to the channel's thread, except for `counts`.
    """

    def __init__(
        self,
        channel: str,
        on_refused: Callable[[RefusalReason], object] = lambda reason: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the counters; `on_refused` is called for each rejected message."""
        self._channel = channel
        self._on_refused = on_refused
        self._clock = clock
        self._counts: Counter[RefusalReason] = Counter()
        # (time, count at that time) of the last line
        self._logged: dict[RefusalReason, tuple[float, int]] = {}

    @property
    def counts(self) -> Mapping[RefusalReason, int]:
        return dict(self._counts)

    def add(self, reason: RefusalReason, what: str) -> None:
        """Count a message.

        The first message of each reason is logged. Later ones are logged at most every ten seconds,
        with their number since then.
        """
        self._counts[reason] += 1
        self._on_refused(reason)
        now = self._clock()
        count = self._counts[reason]
        logged_s, logged_count = self._logged.get(reason, (now - LOG_INTERVAL_S, 0))
        if now - logged_s >= LOG_INTERVAL_S:
            self._logged[reason] = now, count
            logger.warning(
                "%s: rejected %d messages (%s), the last: %s",
                self._channel,
                count - logged_count,
                reason,
                what,
            )
