"""One worker as the router sees it: what it reported of itself, and what the router has given it since.

Reports are always a little old. A `Booking` is the router's own count of what it gave away; estimates add the bookings
made since the last report to what that report has, so that a burst does not all land on one worker. What a report shows
as free, less what was sent there since, is what can be booked: with one router a pool that is full gets no request to
refuse, with several it may.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import grpc

from protos import worker_pb2
from router.text.model_facts import ModelLimits
from router.workers.policy import Candidate, DecodePace, PrefillPace
from router.workers.prefix_index import PrefixIndex
from runtime.clock import Clock, SystemClock

# Prompts wait here, where they are ordered and dropped, rather than at a worker, which gets as many as keep it busy
# while it reports and is asked.
PREFILL_LOOKAHEAD_S = 0.5
PREFILL_LOOKAHEAD = 3  # prompts, however long they are
DECODE_LOOKAHEAD = 3  # requests on their way to a decode pool that is busy, or half as many as it computes at a time
GROWTH_S = 0.5  # from a report to the reservation of a request that is placed by it
SHORT_RATIO = 4  # a prompt beside one that is so many times as long does not wait for all of it


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)  # two claims of the same size are two claims
class Booking:
    """A request's claim on a worker, from the choice to `release`. A new incarnation of the worker owes it nothing.
    `incarnation` and `compatibility` are those of the worker that was chosen."""

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
        """The worker that was chosen cannot be reached. One that has started anew is another worker."""
        if not self.is_outlived:
            self.worker.lost(reason)

    def reserved(self) -> None:
        """The worker has reserved; its next report shows it."""
        if not self.has_reserved:
            self.has_reserved = True
            self.worker.on_change()

    def began(self) -> None:
        """A decode pool begins with the answer."""
        self.num_beside = self.worker.num_booked

    def answered(self, num_tokens: int, seconds: float) -> None:
        """A decode pool drew so many tokens in so many seconds."""
        if not self.is_outlived:
            self.worker.decode_pace.observe((self.num_beside + self.worker.num_booked) // 2, num_tokens, seconds)

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

    def ahead_of(self, report: "_Claims", reported: "_Claims") -> "_Claims":
        """An estimate of what is there now: the report, plus what changed here since; never less than our own."""
        return _Claims(max(self.requests, reported.requests + self.requests - report.requests),
                       max(self.tokens, reported.tokens + self.tokens - report.tokens))


@dataclass
class Worker:
    """Mutable state of one address; only discovery, its watch and its requests write it."""

    role: WorkerRole
    address: str
    channel: grpc.aio.Channel
    on_change: Callable[[], None]
    clock: Clock = field(default_factory=SystemClock)
    index: PrefixIndex = field(default_factory=PrefixIndex)  # the router's, of all workers
    info: worker_pb2.WorkerInfo | None = None
    load: worker_pb2.WorkerLoad = field(default_factory=worker_pb2.WorkerLoad)
    mismatch: str = ""  # why what it said about itself makes it useless here; empty if it does not
    problem: str = "not reached yet"  # why it cannot be used; empty if it can
    is_listed: bool = True
    start_s: float = 0.0  # how long its last start took, as far as it has said; kept while it is away
    _bookings: list[Booking] = field(default_factory=list)
    _outlived: list[Booking] = field(default_factory=list)  # of earlier incarnations: claims no more
    _streams: list[object] = field(default_factory=list)
    _claims_at_report: _Claims = field(default_factory=_Claims)
    _finished: list[Booking] = field(default_factory=list)  # whose memory the last report does not show as free

    def __post_init__(self) -> None:
        self.prefill_pace, self.decode_pace = PrefillPace(self.clock), DecodePace(self.clock)

    @property
    def num_booked(self) -> int:
        """Requests this router has there."""
        return len(self._bookings)

    def num_sharing(self, num_more: int, num_tokens: int) -> int:
        """Requests that a decode pool draws for if so many more, with prompts of so many tokens, come to it."""
        if self.info is None or not num_more or not self.as_candidate(num_tokens).has_room:
            return self.num_booked
        return min(self.num_booked + num_more, self._most_running)

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens of this router's requests there that are not computed yet."""
        return sum(booking.num_tokens for booking in self._bookings)

    @property
    def is_usable(self) -> bool:
        return not self.problem and self.is_listed

    @property
    def unlisted(self) -> str:
        """Why a worker that serves gets nothing new; empty if it is listed."""
        return "" if self.is_listed else f"discovery does not name it any more; {len(self._streams)} streams go on"

    @property
    def is_in_use(self) -> bool:
        """Whether a request needs its channel."""
        return bool(self._bookings or self._outlived or self._streams)

    def listed(self) -> None:
        """Discovery names it. Idempotent."""
        if not self.is_listed:
            self.is_listed = True
            self.on_change()

    def delisted(self) -> None:
        """Discovery does not name it any more; what runs there goes on. Idempotent."""
        if self.is_listed:
            self.is_listed = False
            self.on_change()

    def attach(self, stream: object) -> None:
        """A stream uses its channel, from now to `detach`."""
        self._streams.append(stream)

    def detach(self, stream: object) -> None:
        """Idempotent."""
        if stream in self._streams:
            self._streams.remove(stream)
            self.on_change()

    @property
    def incarnation(self) -> str:
        return self.info.incarnation if self.info is not None else ""

    @property
    def compatibility(self) -> str:
        return self.info.compatibility if self.info is not None else ""

    @property
    def max_context_tokens(self) -> int | None:
        """The longest sequence it can hold when it is empty; None before it said so, and if it is useless anyway."""
        if self.info is None or self.mismatch:
            return None
        return min(self.info.max_context_tokens, self.info.pages_total * self.info.page_size)

    def can_hold(self, context_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits when it is empty, as far as it has said."""
        limit = self.max_context_tokens
        return limit is None or context_tokens <= limit

    def introduced(self, info: worker_pb2.WorkerInfo, facts: ModelLimits) -> None:
        """Its facts arrived. Claims on an earlier incarnation died with it."""
        if info.incarnation != self.incarnation:
            self._outlived += self._bookings
            self._bookings.clear()
            self._finished.clear()
            self._claims_at_report = _Claims()
            self.prefill_pace.restarted()
            self.index.forget(self.address)
        self.info = info
        self.load = worker_pb2.WorkerLoad()
        self.mismatch = _mismatch(info, self.role, facts)
        self.problem = self.mismatch or "no load report yet"
        self.on_change()

    def reported(self, load: worker_pb2.WorkerLoad) -> None:
        """A load report arrived; `introduced` came before."""
        self.load = load
        self.start_s = load.start_s or self.start_s
        self._claims_at_report = self._claims()
        self._finished.clear()
        for booking in self._bookings:
            booking.is_reported = booking.has_reserved
        not_serving = "" if load.serving else load.reason or "not serving"
        self.problem = self.mismatch or not_serving
        self.on_change()

    def lost(self, reason: str) -> None:
        """It cannot be reached; its next report makes it usable again."""
        self.problem = reason
        self.on_change()

    def book(self, num_tokens: int, context_tokens: int = 0, num_held: int = 0) -> Booking:
        """A claim of a prompt of `num_tokens`; `context_tokens` is what it may come to with its completion, 0: any.
        `num_held` of the prompt's tokens it need not compute, or be sent."""
        booking = Booking(self, self.incarnation, self.compatibility, num_tokens - num_held,
                          self._pages(num_tokens, context_tokens), num_held)
        self._bookings.append(booking)
        if self.role is WorkerRole.PREFILL:
            self.prefill_pace.began()
        return booking

    def finished(self, booking: Booking) -> None:
        """It has given this booking's memory back, before its next report says so."""
        if booking in self._bookings and booking.is_reported:
            booking.is_reported = False
            self._finished.append(booking)

    def release(self, booking: Booking, num_computed: int = 0) -> None:
        """`num_computed`: tokens of a prompt that it computed."""
        if booking in self._outlived:
            self._outlived.remove(booking)
            self.on_change()
        elif booking in self._bookings:
            self._bookings.remove(booking)
            if self.role is WorkerRole.PREFILL:
                self.prefill_pace.ended(num_computed)
            self.on_change()

    def as_candidate(self, num_tokens: int, context_tokens: int = 0) -> Candidate:
        """This worker for a policy that places a prompt of `num_tokens`; `context_tokens` as for `book`."""
        if self.role is WorkerRole.PREFILL:
            now = self._estimate(self.load.queued_requests, self.load.queued_tokens)
            return Candidate(self.address, now.tokens, has_room=self._prefill_room(num_tokens))
        now = self._estimate(self.load.running_requests + self.load.queued_requests, 0)
        room = self.info.pages_total * self.info.page_size if self.info is not None else 0
        return Candidate(self.address, self._used_share(now.requests), token_load=1 / max(room, 1),
                         has_room=self._decode_room(now, self._pages(num_tokens, context_tokens)))

    @property
    def has_queue_place(self) -> bool:
        """Whether a prefill worker would queue one more prompt, be it for long."""
        limit = self.info.max_queued_requests if self.info is not None else 0
        return not limit or self._estimate(self.load.queued_requests, self.load.queued_tokens).requests < limit

    def _prefill_room(self, num_tokens: int) -> bool:
        rate = self.prefill_pace.tokens_per_s
        if not self.has_queue_place or rate is None or len(self._bookings) < PREFILL_LOOKAHEAD:
            return self.has_queue_place
        ahead = sum(min(booking.num_tokens, SHORT_RATIO * num_tokens) for booking in self._bookings)
        return ahead < rate * PREFILL_LOOKAHEAD_S

    def _decode_room(self, now: _Claims, num_pages: int) -> bool:
        if self.info is None:
            return True
        if self.load.queued_requests:  # requests that were set back for want of pages go first
            return False
        sent = self._unreported
        pages_free = self.load.pages_free + sum(booking.num_pages for booking in self._finished)
        pages = sum(booking.num_pages for booking in sent) + num_pages + self._growth_pages
        slots_fit = not self.info.slots_total or len(sent) < self.load.slots_free + len(self._finished)
        return now.requests < self._most_running and pages <= pages_free and slots_fit

    @property
    def _growth_pages(self) -> int:
        """What those that draw take until a request that is given to it now gets there."""
        token_s = self.decode_pace.token_s(len(self._bookings))
        if token_s is None or self.info is None:
            return 0
        return round(self.load.running_requests * GROWTH_S / token_s / max(self.info.page_size, 1))

    @property
    def _most_running(self) -> int:
        """Requests a decode pool is given: as many as it computes at a time and some on their way, though it would hold
        more. More would take turns, and all of them end later for it."""
        if self.info is None:
            return 0
        batch = self.info.max_batch_requests or self.info.max_running_requests
        return min(batch + max(DECODE_LOOKAHEAD, batch // 2), self.info.max_running_requests)

    def _used_share(self, num_requests: int) -> float:
        if self.info is None:
            return 0.0
        pages_used = self.info.pages_total - self.load.pages_free
        pages_used += sum(booking.num_pages for booking in self._unreported)
        return max(num_requests / max(self.info.max_running_requests, 1), pages_used / max(self.info.pages_total, 1))

    @property
    def _unreported(self) -> list[Booking]:
        """What holds memory, or will, that the last report did not count."""
        return [booking for booking in self._bookings if not booking.is_reported and booking not in self._finished]

    def _claims(self) -> _Claims:
        return _Claims(len(self._bookings), sum(booking.num_tokens for booking in self._bookings))

    def _estimate(self, reported_requests: int, reported_tokens: int) -> _Claims:
        return self._claims().ahead_of(self._claims_at_report, _Claims(reported_requests, reported_tokens))

    def _pages(self, num_tokens: int, context_tokens: int = 0) -> int:
        """What a decode pool reserves: the prompt and a page's growth, but no more than the request may come to."""
        page_size = max(self.info.page_size, 1) if self.info is not None else 1
        most = max(num_tokens, context_tokens or num_tokens + page_size)
        return -(-min(num_tokens + page_size, most) // page_size)


def _mismatch(info: worker_pb2.WorkerInfo, role: WorkerRole, facts: ModelLimits) -> str:
    """Why a worker must not serve this router's model; empty if it may."""
    if info.role != role:
        return f"it is a {info.role} worker, configured as {role}"
    expected = {"architecture": facts.architecture, "vocab_size": facts.vocab_size, "num_layers": facts.num_layers}
    for name, value in expected.items():
        if getattr(info, name) != value:
            return f"it serves another model: {name} is {getattr(info, name)}, the router's is {value}"
    digests = info.tokenizer_digest, facts.tokenizer_digest
    if all(digests) and digests[0] != digests[1]:  # one that has no tokenizer cannot misread a prompt
        return f"it has another tokenizer: the digest of its tokenizer.json is {digests[0]}, the router's {digests[1]}"
    return ""
