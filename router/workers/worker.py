"""One worker as the router sees it: its reports, the router's bookings, and the call its requests
share.

Reports are always slightly old. A `Booking` is the router's own record of a placed request.
Estimates add the bookings made since the last report, so that a burst does not go to one worker
only. Capacity that a report shows as free, less what was sent since, can be booked. With a single
router a full pool therefore gets no request to refuse; with several it may.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import grpc

from protos import decode_pb2, prefill_pb2, worker_pb2
from router.text.model_facts import ModelLimits
from router.workers.candidate import Candidate, WorkerSnapshot, reserved_tokens
from router.workers.pace import AnswerPace, DecodePace, PrefillPace
from router.workers.prefix_index import RoleCaches
from router.workers.worker_call import DECODE_CALL, PREFILL_CALL, CallSlot
from runtime.clock import Clock, SystemClock

# Prompts queue in the router, which orders and drops them. A worker gets only as many prompts as
# keep it busy until its next report has led to a new placement.
PREFILL_LOOKAHEAD_S = 0.5
PREFILL_LOOKAHEAD = 3  # prompts, regardless of their length
# Requests on their way to a busy decode pool, or half of its batch if that is more.
DECODE_LOOKAHEAD = 3
GROWTH_S = 0.5  # from a report until a request placed by it has reserved


class WorkerRole(StrEnum):
    """Role of a worker, as spelled in reports, flags and metrics."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)  # compared by identity: two claims of the same size are two claims
class Booking:
    """A request's claim on a worker, from the choice to `release`.

    A new incarnation of the worker does not inherit the claim. `incarnation` and `compatibility`
    are those of the chosen worker.
    """

    worker: "Worker"
    incarnation: str
    compatibility: str
    num_tokens: int  # prompt tokens that the worker lacks
    num_pages: int  # pages that a pool reserves for the prompt and its growth
    num_cached: int = 0  # prompt tokens that the worker reported as cached
    has_reserved: bool = False
    is_reported: bool = False
    num_beside: int = 0  # requests on the pool when decoding began, including this one
    holder: "Worker | None" = None  # from which a prefill worker may pull more of the prompt

    @property
    def address(self) -> str:
        return self.worker.address

    @property
    def is_outlived(self) -> bool:
        """Return whether the worker has restarted since the booking."""
        return self.worker.incarnation != self.incarnation

    def lost(self, reason: str) -> None:
        """Mark the worker as lost. Has no effect after its restart."""
        if not self.is_outlived:
            self.worker.lost(reason)

    def reserved(self) -> None:
        """Record that the worker has reserved memory; its next report includes it."""
        if not self.has_reserved:
            self.has_reserved = True
            self.worker.load_changed()

    def began(self) -> None:
        """Record that a decode pool begins to generate."""
        self.num_beside = self.worker.num_booked

    def answered(self, num_tokens: int, seconds: float) -> None:
        """Record that a decode pool generated `num_tokens` in `seconds`."""
        if not self.is_outlived:
            self.worker.decode_pace.observe(
                (self.num_beside + self.worker.num_booked) // 2, num_tokens, seconds
            )
            self.worker.answer_pace.answered(seconds)

    def record_handoff(self, waited_s: float) -> None:
        """Record that a decode pool has the prompt's missing part, `waited_s` after its first token."""
        if not self.is_outlived:
            self.worker.answer_pace.record_handoff(self.num_tokens, waited_s)

    def finished(self) -> None:
        """Record that a decode pool has released the request's memory."""
        self.worker.finished(self)

    def computed(self) -> None:
        """Record that a prefill worker has computed the prompt, and release the booking."""
        self.worker.release(self, num_computed=self.num_tokens)

    def release(self) -> None:
        """Release the booking. Idempotent."""
        self.worker.release(self)


@dataclass
class _Claims:
    """Sums over the bookings of one worker."""

    requests: int = 0
    tokens: int = 0


@dataclass
class Worker:
    """Mutable state of one address; written only by discovery, its watch and its requests."""

    role: WorkerRole
    address: str
    channel: grpc.aio.Channel
    on_change: Callable[[], None]
    on_load: Callable[[], None]  # called instead of `on_change` if only load or bookings changed
    clock: Clock = field(default_factory=SystemClock)
    caches: RoleCaches = field(default_factory=RoleCaches)  # of all workers of the role
    identity: Callable[[], object] = lambda: None  # credentials that the channel shows
    info: worker_pb2.WorkerInfo | None = None
    load: worker_pb2.WorkerLoad = field(default_factory=worker_pb2.WorkerLoad)
    mismatch: str = ""  # why its info rules the worker out; empty if it does not
    problem: str = "not reached yet"  # why the worker cannot be used; empty if it can
    is_listed: bool = True
    same_as: str = ""  # the address used for this worker; empty if it is this one
    start_s: float = 0.0  # duration of its last reported start; kept while it is away
    tokens_ahead: int = 0  # prompt tokens of this router's requests not yet computed there
    _most_running: int = 0  # requests that a decode pool is given at a time
    _bookings: dict[Booking, None] = field(default_factory=dict)  # in booking order
    _outlived: dict[Booking, None] = field(default_factory=dict)  # of earlier incarnations
    _streams: dict[object, None] = field(default_factory=dict)
    _claims_at_report: _Claims = field(default_factory=_Claims)
    # Bookings whose memory was released after the last report.
    _finished: dict[Booking, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A worker has one role: only one of the two is ever used.
        self.prefill_calls: CallSlot[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent] = CallSlot(
            PREFILL_CALL, self.channel, self.identity
        )
        self.decode_calls: CallSlot[decode_pb2.DecodeInput, decode_pb2.DecodeEvent] = CallSlot(
            DECODE_CALL, self.channel, self.identity
        )
        self.prefill_pace, self.decode_pace = PrefillPace(self.clock), DecodePace(self.clock)
        self.answer_pace = AnswerPace(self.clock)

    def changed(self) -> None:
        """Drop the snapshot and notify: load or usability of the worker may have changed."""
        self._drop_snapshot()
        self.on_change()

    def load_changed(self) -> None:
        """Drop the snapshot and notify: only the load may have changed, as after most reports."""
        self._drop_snapshot()
        self.on_load()

    @property
    def num_booked(self) -> int:
        """Return the number of this router's requests on the worker."""
        return len(self._bookings)

    def num_sharing(self, num_more: int, num_tokens: int) -> int:
        """Return the number of requests a decode pool would serve after accepting more.

        `num_more` requests with prompts of `num_tokens` tokens are offered.
        """
        num_booked = len(self._bookings)
        if not num_more or self.info is None or not self.snapshot.has_room(num_tokens):
            return num_booked
        return min(num_booked + num_more, self._most_running)

    @property
    def is_usable(self) -> bool:
        return self.can_serve and not self.same_as

    @property
    def can_serve(self) -> bool:
        """Return whether the worker could be used by this address."""
        return not self.problem and self.is_listed

    def stand_in_for(self, address: str) -> bool:
        """Use this worker by `address`, or by its own if empty; return whether that is a change."""
        if self.same_as == address:
            return False
        self.same_as = address
        self._drop_snapshot()
        return True

    @property
    def unlisted(self) -> str:
        """Return why a worker that serves gets no new requests; empty if it is listed."""
        return (
            ""
            if self.is_listed
            else f"discovery no longer lists it; {len(self._streams)} streams go on"
        )

    @property
    def is_in_use(self) -> bool:
        """Return whether a request needs its channel."""
        return bool(self._bookings or self._outlived or self._streams)

    def listed(self) -> None:
        """Mark the worker as listed by discovery. Idempotent."""
        if not self.is_listed:
            self.is_listed = True
            self.changed()

    def delisted(self) -> None:
        """Mark the worker as no longer listed; running requests go on. Idempotent."""
        if self.is_listed:
            self.is_listed = False
            self.changed()

    def attach(self, stream: object) -> None:
        """Register a request's stream on its channel, until `detach`."""
        self._streams[stream] = None

    def detach(self, stream: object) -> None:
        """Remove a stream from its channel. Idempotent."""
        if stream in self._streams:
            del self._streams[stream]
            if not self.is_listed:  # the worker may be dropped now
                self.changed()

    @property
    def incarnation(self) -> str:
        return self.info.incarnation if self.info is not None else ""

    @property
    def compatibility(self) -> str:
        return self.info.compatibility if self.info is not None else ""

    @property
    def max_context_tokens(self) -> int | None:
        """Return the longest sequence the empty worker can hold, in tokens; None if unknown or
        ruled out.
        """
        if self.info is None or self.mismatch:
            return None
        return min(self.info.max_context_tokens, self.info.pages_total * self.info.page_size)

    def may_compute(self, num_rest: int) -> bool:
        """Return whether a decode pool would prefill the last `num_rest` tokens itself."""
        return num_rest <= self.load.local_rest_tokens

    def introduced(self, info: worker_pb2.WorkerInfo, facts: ModelLimits) -> None:
        """Store the info; drop bookings of a previous incarnation. A usable worker stays usable."""
        is_known = self.is_usable and info.incarnation == self.incarnation
        if info.incarnation != self.incarnation:
            self._outlived |= self._bookings
            self._bookings.clear()
            self.tokens_ahead = 0
            self._finished.clear()
            self._claims_at_report = _Claims()
            self.prefill_pace.restarted()
            self.caches.forget(self.address)
        self.info, self._most_running = info, _most_running(info)
        self.mismatch = facts.mismatch(info, self.role)
        if self.mismatch or not is_known:
            self.load = worker_pb2.WorkerLoad()
            self.prefill_pace.introduced()
            self.problem = self.mismatch or "no load report yet"
        self.changed()

    def reported(self, load: worker_pb2.WorkerLoad) -> None:
        """Apply a load report; `introduced` must have been called before."""
        self.prefill_pace.reported(load.prompt_tokens, load.queued_tokens, self.tokens_ahead)
        self.load = load
        self._claims_at_report = _Claims(len(self._bookings), self.tokens_ahead)
        self._finished.clear()
        for booking in self._bookings:
            booking.is_reported = booking.has_reserved
        before = self.problem, self.start_s
        not_serving = "" if load.serving else load.reason or "not serving"
        self.problem = self.mismatch or not_serving
        self.start_s = load.start_s or self.start_s
        if (self.problem, self.start_s) == before:
            self.load_changed()
        else:
            self.changed()

    @property
    def prompts_ahead(self) -> list[float]:
        """Return the uncomputed tokens of each prompt of this router there, as an estimate.

        Reported progress is spread over these prompts in proportion.
        """
        left = max(0.0, 1 - self.prefill_pace.tokens_under_way / max(self.tokens_ahead, 1))
        return [booking.num_tokens * left for booking in self._bookings]

    def lost(self, reason: str) -> None:
        """Mark the worker as unreachable; its next report makes it usable again."""
        self.problem = reason
        self.changed()

    def book(
        self, num_tokens: int, context_tokens: int = 0, num_cached: int = 0, num_brought: int = 0
    ) -> Booking:
        """Book a prompt of `num_tokens` tokens.

        `context_tokens` is the maximum length with the completion, 0 if unknown. `num_cached` of the
        tokens are cached, neither computed nor sent, and `num_brought` are to be read or pulled.
        """
        page_size = self.snapshot.page_size
        booking = Booking(
            self,
            self.incarnation,
            self.compatibility,
            num_tokens - num_cached - num_brought,
            -(-reserved_tokens(num_tokens, context_tokens, page_size) // page_size),
            num_cached,
        )
        self._bookings[booking] = None
        self.tokens_ahead += booking.num_tokens
        self._drop_snapshot()
        if self.role is WorkerRole.PREFILL:
            self.prefill_pace.began()
        return booking

    def finished(self, booking: Booking) -> None:
        """Count a booking's memory as free before the next report does."""
        if booking in self._bookings and booking.is_reported:
            booking.is_reported = False
            self._finished[booking] = None
            self._drop_snapshot()

    def release(self, booking: Booking, num_computed: int = 0) -> None:
        """Release a booking. `num_computed`: prompt tokens that the worker computed for it."""
        if booking in self._outlived:
            del self._outlived[booking]
            self.changed()
        elif booking in self._bookings:
            del self._bookings[booking]
            self.tokens_ahead -= booking.num_tokens
            if self.role is WorkerRole.PREFILL:
                self.prefill_pace.ended(num_computed)
            if self.is_listed:
                self.load_changed()
            else:  # this may have been the last booking
                self.changed()

    @cached_property
    def snapshot(self) -> WorkerSnapshot:
        """Return the worker's state for placement.

        Rebuilt after a change. It is a cached attribute because every choice considers all workers.
        """
        stands = (
            self._prefill_snapshot if self.role is WorkerRole.PREFILL else self._decode_snapshot
        )
        longest = self.max_context_tokens if self.is_usable else -1
        return stands(
            math.inf if longest is None else longest,
            1 if self.info is None else max(self.info.page_size, 1),
        )

    def _drop_snapshot(self) -> None:
        vars(self).pop("snapshot", None)

    @property
    def has_queue_place(self) -> bool:
        """Return whether a prefill worker would queue one more prompt, even for long."""
        return self.snapshot.has_place

    def _prefill_snapshot(self, longest: float, page_size: int) -> WorkerSnapshot:
        num_tokens = _estimate(
            self.load.queued_tokens, self.tokens_ahead, self._claims_at_report.tokens
        )
        limit = self.info.max_queued_requests if self.info is not None else 0
        rate = self.prefill_pace.tokens_per_s
        is_busy = rate is not None and len(self._bookings) >= PREFILL_LOOKAHEAD
        has_place = not limit or self._num_requests(self.load.queued_requests) < limit
        candidate = Candidate(self.address, num_tokens, load_s=1 / rate if rate else 0.0)
        ahead = tuple([booking.num_tokens for booking in self._bookings]) if is_busy else ()
        return WorkerSnapshot(
            longest,
            self.compatibility,
            page_size,
            candidate,
            has_place,
            tokens_left=math.inf if has_place else -1,
            prompts_ahead=ahead,
            busy_tokens=math.inf if rate is None else rate * PREFILL_LOOKAHEAD_S,
            tokens_ahead=self.tokens_ahead,
            longest_ahead=max(ahead, default=0),
        )

    def _decode_snapshot(self, longest: float, page_size: int) -> WorkerSnapshot:
        num_requests = self._num_requests(self.load.running_requests + self.load.queued_requests)
        if self.info is None:
            return WorkerSnapshot(
                longest,
                "",
                page_size,
                Candidate(self.address, 0.0),
                has_place=True,
                tokens_left=math.inf,
            )
        sent = self._unreported
        pages_sent = sum(booking.num_pages for booking in sent)
        pages_free = self.load.pages_free + sum(booking.num_pages for booking in self._finished)
        slots_fit = not self.info.slots_total or len(sent) < self.load.slots_free + len(
            self._finished
        )
        pages_used = self.info.pages_total - self.load.pages_free + pages_sent
        used_share = max(
            num_requests / max(self.info.max_running_requests, 1),
            pages_used / max(self.info.pages_total, 1),
        )
        # Requests that were preempted for lack of pages go first.
        has_place = (
            not self.load.queued_requests and num_requests < self._most_running and slots_fit
        )
        token_load = 1 / max(self.info.pages_total * page_size, 1) + self.answer_pace.token_share
        candidate = Candidate(
            self.address, used_share, token_load=token_load, load_s=self.answer_pace.answer_s
        )
        return WorkerSnapshot(
            longest,
            self.compatibility,
            page_size,
            candidate,
            has_place,
            (pages_free - pages_sent - self._growth_pages) * page_size if has_place else -1,
        )

    @property
    def _growth_pages(self) -> int:
        """Return the pages that running requests take until a request placed now reserves."""
        token_s = self.decode_pace.token_s(len(self._bookings))
        if token_s is None or self.info is None:
            return 0
        return round(self.load.running_requests * GROWTH_S / token_s / max(self.info.page_size, 1))

    @property
    def _unreported(self) -> list[Booking]:
        """Return the bookings whose memory the last report did not count."""
        return [
            booking
            for booking in self._bookings
            if not booking.is_reported and booking not in self._finished
        ]

    def _num_requests(self, num_reported: int) -> int:
        return _estimate(num_reported, len(self._bookings), self._claims_at_report.requests)


def _estimate(reported: int, booked: int, booked_at_report: int) -> int:
    """Return the current value: the report plus changes since, at least this router's own."""
    return max(booked, reported + booked - booked_at_report)


def _most_running(info: worker_pb2.WorkerInfo) -> int:
    """Return how many requests a decode pool is given: its batch and some on their way.

    The pool would hold more. They would take turns, and each of them would end later.
    """
    batch = info.max_batch_requests or info.max_running_requests
    return min(batch + max(DECODE_LOOKAHEAD, batch // 2), info.max_running_requests)
