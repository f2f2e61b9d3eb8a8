"""One worker as the router sees it: what it reported of itself, what the router has given it since,
and the call that its requests share.

Reports are always a little old. A `Booking` is the router's own count of what it gave away;
estimates add the bookings made since the last report to what that report has, so that a burst does
not all land on one worker. What a report shows as free, less what was sent there since, is what can
be booked: with one router a pool that is full gets no request to refuse, with several it may.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import grpc

from protos import decode_pb2, prefill_pb2, worker_pb2
from router.text.model_facts import ModelLimits
from router.workers.pace import AnswerPace, DecodePace, PrefillPace
from router.workers.policy import Candidate, WorkerSnapshot, reserved_tokens
from router.workers.prefix_index import PrefixIndex
from router.workers.worker_call import DECODE_CALL, PREFILL_CALL, CallSlot
from runtime.clock import Clock, SystemClock

# Prompts wait here, where they are ordered and dropped, rather than at a worker, which gets as many
# as keep it busy while it reports and is asked.
PREFILL_LOOKAHEAD_S = 0.5
PREFILL_LOOKAHEAD = 3  # prompts, however long they are
# requests on their way to a decode pool that is busy, or half as many as it computes at a time
DECODE_LOOKAHEAD = 3
GROWTH_S = 0.5  # from a report to the reservation of a request that is placed by it


class WorkerRole(StrEnum):
    """As reports, flags and metrics spell it."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)  # two claims of the same size are two claims
class Booking:
    """A request's claim on a worker, from the choice to `release`. A new incarnation of the worker
    owes it nothing. `incarnation` and `compatibility` are those of the worker that was chosen."""

    worker: "Worker"
    incarnation: str
    compatibility: str
    num_tokens: int  # of the prompt; those that a prefill worker has to compute
    num_pages: int  # the prompt and what a pool reserves beyond it
    num_held: int = 0  # tokens of the prompt that the worker has, as it reported
    has_reserved: bool = False
    is_reported: bool = False
    num_beside: int = 0  # requests there when its answer began, itself included

    @property
    def is_outlived(self) -> bool:
        """Whether the worker has started anew since."""
        return self.worker.incarnation != self.incarnation

    def lost(self, reason: str) -> None:
        """The worker that was chosen cannot be reached. One that has started anew is another
        worker."""
        if not self.is_outlived:
            self.worker.lost(reason)

    def reserved(self) -> None:
        """The worker has reserved; its next report shows it."""
        if not self.has_reserved:
            self.has_reserved = True
            self.worker.load_changed()

    def began(self) -> None:
        """A decode pool begins with the answer."""
        self.num_beside = self.worker.num_booked

    def answered(self, num_tokens: int, seconds: float) -> None:
        """A decode pool drew so many tokens in so many seconds."""
        if not self.is_outlived:
            self.worker.decode_pace.observe(
                (self.num_beside + self.worker.num_booked) // 2, num_tokens, seconds
            )
            self.worker.answer_pace.answered(seconds)

    def landed(self, waited_s: float) -> None:
        """What a decode pool lacked of the prompt is there, so long after the first token."""
        if not self.is_outlived:
            self.worker.answer_pace.landed(self.num_tokens, waited_s)

    def finished(self) -> None:
        """A decode pool has given the request's memory back."""
        self.worker.finished(self)

    def computed(self) -> None:
        """A prefill worker has computed the prompt. Releases."""
        self.worker.release(self, num_computed=self.num_tokens)

    def release(self) -> None:
        """Idempotent."""
        self.worker.release(self)


@dataclass
class _Claims:
    """Sums over the bookings of one worker."""

    requests: int = 0
    tokens: int = 0


@dataclass
class Worker:
    """Mutable state of one address; only discovery, its watch and its requests write it."""

    role: WorkerRole
    address: str
    channel: grpc.aio.Channel
    on_change: Callable[[], None]
    on_load: Callable[
        [], None
    ]  # in place of it where only its load, or what is booked there, is another
    clock: Clock = field(default_factory=SystemClock)
    index: PrefixIndex = field(default_factory=PrefixIndex)  # the router's, of all workers
    identity: Callable[[], object] = lambda: None  # what the channel shows to the worker
    info: worker_pb2.WorkerInfo | None = None
    load: worker_pb2.WorkerLoad = field(default_factory=worker_pb2.WorkerLoad)
    mismatch: str = ""  # why what it said about itself makes it useless here; empty if it does not
    problem: str = "not reached yet"  # why it cannot be used; empty if it can
    is_listed: bool = True
    same_as: str = ""  # the address that this worker is used by; empty where that is this one
    start_s: float = (
        0.0  # how long its last start took, as far as it has said; kept while it is away
    )
    tokens_ahead: int = 0  # of prompts of this router's requests there that are not computed yet
    _most_running: int = 0  # requests a decode pool is given
    _bookings: dict[Booking, None] = field(default_factory=dict)  # in their order
    _outlived: dict[Booking, None] = field(
        default_factory=dict
    )  # of earlier incarnations: claims no more
    _streams: dict[object, None] = field(default_factory=dict)
    _claims_at_report: _Claims = field(default_factory=_Claims)
    _finished: dict[Booking, None] = field(
        default_factory=dict
    )  # whose memory the last report does not show as free

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
        """What choices go by may be another, and whether it can be used at all."""
        self._drop_snapshot()
        self.on_change()

    def load_changed(self) -> None:
        """What choices go by may be another. Most reports say no more."""
        self._drop_snapshot()
        self.on_load()

    @property
    def num_booked(self) -> int:
        """Requests this router has there."""
        return len(self._bookings)

    def num_sharing(self, num_more: int, num_tokens: int) -> int:
        """Requests that a decode pool draws for if so many more, with prompts of so many tokens,
        come to it."""
        num_booked = len(self._bookings)
        if not num_more or self.info is None or not self.snapshot.has_room(num_tokens):
            return num_booked
        return min(num_booked + num_more, self._most_running)

    @property
    def is_usable(self) -> bool:
        return self.can_serve and not self.same_as

    @property
    def can_serve(self) -> bool:
        """Whether it could be used by this address."""
        return not self.problem and self.is_listed

    def stand_in_for(self, address: str) -> bool:
        """Use this worker by `address` and not by its own, or by its own again where that is empty.
        Return whether that is a change."""
        if self.same_as == address:
            return False
        self.same_as = address
        self._drop_snapshot()
        return True

    @property
    def unlisted(self) -> str:
        """Why a worker that serves gets nothing new; empty if it is listed."""
        return (
            ""
            if self.is_listed
            else f"discovery does not name it any more; {len(self._streams)} streams go on"
        )

    @property
    def is_in_use(self) -> bool:
        """Whether a request needs its channel."""
        return bool(self._bookings or self._outlived or self._streams)

    def listed(self) -> None:
        """Discovery names it. Idempotent."""
        if not self.is_listed:
            self.is_listed = True
            self.changed()

    def delisted(self) -> None:
        """Discovery does not name it any more; what runs there goes on. Idempotent."""
        if self.is_listed:
            self.is_listed = False
            self.changed()

    def attach(self, stream: object) -> None:
        """A request's stream uses its channel, from now to `detach`."""
        self._streams[stream] = None

    def detach(self, stream: object) -> None:
        """Idempotent."""
        if stream in self._streams:
            del self._streams[stream]
            if not self.is_listed:  # it may be dropped now
                self.changed()

    @property
    def incarnation(self) -> str:
        return self.info.incarnation if self.info is not None else ""

    @property
    def compatibility(self) -> str:
        return self.info.compatibility if self.info is not None else ""

    @property
    def max_context_tokens(self) -> int | None:
        """The longest sequence it can hold when it is empty; None before it said so, and if it is
        useless anyway."""
        if self.info is None or self.mismatch:
            return None
        return min(self.info.max_context_tokens, self.info.pages_total * self.info.page_size)

    def may_compute(self, num_rest: int) -> bool:
        """Whether a decode pool that has the others computes so many tokens of a prompt itself."""
        return num_rest <= self.load.local_rest_tokens

    def introduced(self, info: worker_pb2.WorkerInfo, facts: ModelLimits) -> None:
        """Its facts arrived. Claims on an earlier incarnation died with it."""
        if info.incarnation != self.incarnation:
            self._outlived |= self._bookings
            self._bookings.clear()
            self.tokens_ahead = 0
            self._finished.clear()
            self._claims_at_report = _Claims()
            self.prefill_pace.restarted()
            self.index.forget(self.address)
        self.info, self._most_running = info, _most_running(info)
        self.load = worker_pb2.WorkerLoad()
        self.prefill_pace.introduced()
        self.mismatch = facts.mismatch(info, self.role)
        self.problem = self.mismatch or "no load report yet"
        self.changed()

    def reported(self, load: worker_pb2.WorkerLoad) -> None:
        """A load report arrived; `introduced` came before."""
        self.prefill_pace.reported(load.prompt_tokens, load.queued_tokens, self.tokens_ahead)
        self.load = load
        self._claims_at_report = _Claims(len(self._bookings), self.tokens_ahead)
        self._finished.clear()
        for booking in self._bookings:
            booking.is_reported = booking.has_reserved
        before = self.problem, self.start_s
        not_serving = "" if load.serving else load.reason or "not serving"
        self.problem, self.start_s = self.mismatch or not_serving, load.start_s or self.start_s
        if (self.problem, self.start_s) == before:
            self.load_changed()
        else:
            self.changed()

    @property
    def prompts_ahead(self) -> list[float]:
        """Tokens of each prompt of this router there, less what was reported to be computed of all
        of them."""
        left = max(0.0, 1 - self.prefill_pace.tokens_under_way / max(self.tokens_ahead, 1))
        return [booking.num_tokens * left for booking in self._bookings]

    def lost(self, reason: str) -> None:
        """It cannot be reached; its next report makes it usable again."""
        self.problem = reason
        self.changed()

    def book(self, num_tokens: int, context_tokens: int = 0, num_held: int = 0) -> Booking:
        """A claim of a prompt of `num_tokens`; `context_tokens` is what it may come to with its
        completion, 0: any. `num_held` of the prompt's tokens it need not compute, or be sent."""
        page_size = self.snapshot.page_size
        booking = Booking(
            self,
            self.incarnation,
            self.compatibility,
            num_tokens - num_held,
            -(-reserved_tokens(num_tokens, context_tokens, page_size) // page_size),
            num_held,
        )
        self._bookings[booking] = None
        self.tokens_ahead += booking.num_tokens
        self._drop_snapshot()
        if self.role is WorkerRole.PREFILL:
            self.prefill_pace.began()
        return booking

    def finished(self, booking: Booking) -> None:
        """It has given this booking's memory back, before its next report says so."""
        if booking in self._bookings and booking.is_reported:
            booking.is_reported = False
            self._finished[booking] = None
            self._drop_snapshot()

    def release(self, booking: Booking, num_computed: int = 0) -> None:
        """`num_computed`: tokens of a prompt that it computed."""
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
            else:  # it may have been its last one
                self.changed()

    @cached_property
    def snapshot(self) -> WorkerSnapshot:
        """Made anew when something has changed. As an attribute, because every choice looks at all
        workers."""
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
        """Whether a prefill worker would queue one more prompt, be it for long."""
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
        # Requests that were set back for want of pages go first.
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
        """What those that draw take until a request that is given to it now gets there."""
        token_s = self.decode_pace.token_s(len(self._bookings))
        if token_s is None or self.info is None:
            return 0
        return round(self.load.running_requests * GROWTH_S / token_s / max(self.info.page_size, 1))

    @property
    def _unreported(self) -> list[Booking]:
        """What holds memory, or will, that the last report did not count."""
        return [
            booking
            for booking in self._bookings
            if not booking.is_reported and booking not in self._finished
        ]

    def _num_requests(self, num_reported: int) -> int:
        return _estimate(num_reported, len(self._bookings), self._claims_at_report.requests)


def _estimate(reported: int, booked: int, booked_at_report: int) -> int:
    """Of what is there now: the report, plus what changed here since; never less than our own."""
    return max(booked, reported + booked - booked_at_report)


def _most_running(info: worker_pb2.WorkerInfo) -> int:
    """As many as it computes at a time and some on their way, though it would hold more. More would
    take turns, and all of them end later for it."""
    batch = info.max_batch_requests or info.max_running_requests
    return min(batch + max(DECODE_LOOKAHEAD, batch // 2), info.max_running_requests)
