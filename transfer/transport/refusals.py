"""Messages that are refused: why, how many, and one line in the log now and then."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0


class RefusalReason(StrEnum):
    """Why a message is not taken. Values are labels of a metric."""

    # no tag of this process: of a stranger, another pool, or a forming that is still to come
    FOREIGN = "foreign"
    EARLIER = "earlier"  # of an earlier forming of this pool
    CROSSED = "crossed"  # of this forming, between other members or the other way round
    REPLAYED = "replayed"  # genuine, and received before
    SKIPPED = "skipped"  # genuine, and others that were sent before it did not arrive
    DAMAGED = "damaged"  # the right tag, and not the right authenticator
    OVERSIZED = "oversized"  # longer than anything that is sent, or one too many
    LATE = "late"  # for an epoch of a handoff that is over
    REPEATED = (
        "repeated"  # for a receive of an open handoff that has its message already, or is cancelled
    )


class Refusals:
    """Counts refused messages of one channel. Belongs to the channel's thread, but for `counts`."""

    def __init__(
        self,
        channel: str,
        on_refused: Callable[[RefusalReason], object] = lambda reason: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_refused` is called for each one."""
        self._channel = channel
        self._on_refused = on_refused
        self._clock = clock
        self._counts: Counter[RefusalReason] = Counter()
        self._logged: dict[RefusalReason, tuple[float, int]] = {}  # when, and the count then

    @property
    def counts(self) -> Mapping[RefusalReason, int]:
        return dict(self._counts)

    def add(self, reason: RefusalReason, what: str) -> None:
        """Count a message. The first of each reason is logged, later ones at most every ten
        seconds, with how many there were since."""
        self._counts[reason] += 1
        self._on_refused(reason)
        now, count = self._clock(), self._counts[reason]
        logged_s, logged_count = self._logged.get(reason, (now - LOG_INTERVAL_S, 0))
        if now - logged_s >= LOG_INTERVAL_S:
            self._logged[reason] = now, count
            logger.warning(
                "%s: refused %d messages (%s), the last: %s",
                self._channel,
                count - logged_count,
                reason,
                what,
            )
