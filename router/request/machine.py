"""The state of one request, from its arrival to its end. Pure: events in, commands out.

Life of a request:

 1. `Admission` queues it until a compatible pair has capacity soon, and books both workers.
 2. The router opens a stream to a prefill worker. The worker queues the request and sends
    `started`, with the terms of its handoff, when its turn comes.
 3. The router opens a stream to a decode pool with these terms. The pool reserves memory on all
    stages and replies with `DestinationTerms`, or refuses and the next pool gets the offer. When
    all pools refuse, the router offers it again while prefill computes.
 4. The destination terms go to the prefill worker, which starts to send.
 5. `first_token` arrives from prefill and goes to the client at once, and to decode.
 6. `committed` arrives from decode when all pages have landed and were verified. The prefill worker
    may then release its memory, and its stream ends.
 7. Tokens arrive from decode and go to the client until `finished`, which also ends that stream. If
    the text contains a stop string, closing the streams is the abort.

If a pool has nearly all of the prompt cached, it is asked first to compute the rest itself. Steps 2
to 6 are then skipped.

A response that another router began takes the same way. Decode recomputes the tokens that the
client has, as after a migration.

Failures. A prefill worker that dies or fails before the commit is replaced, within bounds. The
terms of its replacement go to the same reservation, which receives again under its next epoch. The
first token of the replacement must equal the one already sent. A pair whose handoff failed although
both workers live, or whose terms one of them declined, is remembered as failed; if no source is
left for the pool, the request migrates.

If a decode pool is lost or drains after it reserved, the request migrates, too: another pair starts
over at 2. It recomputes the tokens already sent without sampling or sending them again, and the
stream goes on. Sampling is keyed by seed and position, so the continuation is the same. The pair
must serve the same weights with the same numerics: its compatibility digest fits the lost pool's. A
request that loses pool after pool may itself kill or stall them, so losses are bounded. Pools that
drain hand requests back on purpose and do not count. Neither do preemptions: a request that gives
way to a more urgent one leaves its pool and migrates when its turn comes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from protos import generation_pb2, types_pb2
from router.request.events import (
    Aborted,
    Arrived,
    BookedWorker,
    ClientGone,
    ClientStopped,
    Close,
    Command,
    CommandFailed,
    DeadlinePassed,
    End,
    LinkChecked,
    MarkLost,
    NotAdmitted,
    NoteMigration,
    NoteRetry,
    Outbox,
    PairPlaced,
    Preempted,
    Received,
    ReplyOverdue,
    RequestEvent,
    Reserve,
    SearchFailed,
    SearchPair,
    StreamEnded,
    WorkerFound,
)
from router.request.pair import Joined, PairOutcome, PoolLost, RequestPair, ResponseProgress
from router.request.retries import FlowLimits, MoveReason, move_reason
from router.request.transitions import (
    REQUEST_TRANSITIONS,
    IllegalEventError,
    PoolState,
    RequestState,
    RequestStep,
    Stateful,
)
from router.workers.worker import WorkerRole
from runtime.errors import (
    BatonError,
    DeadlineError,
    PeerLostError,
    RequestAborted,
    UnavailableError,
)


@dataclass(frozen=True, slots=True)
class Migration:
    """A migration under way, until the request has resumed or ended.

    `number` is that of the search. `error` ends the request if no pair is found; `retry_reason`
    labels the retry otherwise, "" if it is none.
    """

    number: int
    reason: MoveReason
    error: PeerLostError
    retry_reason: str


class RequestMachine(Stateful[RequestState, RequestStep]):
    """One request. `on` is the only entry."""

    def __init__(
        self, limits: FlowLimits, timeout_s: float = 0.0, resumed: Sequence[int] = ()
    ) -> None:
        """`timeout_s`: the whole time of the request. `resumed`: tokens the client already has."""
        super().__init__(REQUEST_TRANSITIONS, RequestState.NEW)
        self._limits = limits
        self._timeout_s = timeout_s
        self._progress = ResponseProgress(
            list(resumed),
            types_pb2.TokenChunk(token_ids=resumed[:1]) if resumed else None,
            is_resumed=bool(resumed),
        )
        self._out = Outbox()
        self._placing = 0  # number of the wait for admission
        self._pair: RequestPair | None = None
        self._migration: Migration | None = None
        self._num_lost = 0
        self._num_before = 0  # tokens emitted when the pair was placed

    @property
    def pair(self) -> RequestPair | None:
        """Return the halves of the request on its pair of workers, if it has one."""
        return self._pair

    @property
    def preemptible_on(self) -> BookedWorker | None:
        """Return the pool that generates the response; None if the request cannot give way now.

        On each pair it generates a token first, so that it makes progress.
        """
        pair = self._pair
        if pair is None or pair.pool.state is not PoolState.DECODING:
            return None
        return pair.pool.worker if len(self.token_ids) > self._num_before else None

    @property
    def token_ids(self) -> list[int]:
        """Return the output tokens that were emitted."""
        return self._progress.token_ids

    @property
    def due_at_s(self) -> float | None:
        """Return when a reply of the pool is overdue, on the caller's clock; None if none is due."""
        due = None if self._pair is None else self._pair.pool.due
        return None if due is None else due.at_s

    def on(self, event: RequestEvent, now_s: float) -> list[Command]:
        """Handle an event; return what to do, in order.

        `now_s` is the time of any clock that never goes back. Events of streams and searches that
        were closed have no effect, nor has any event after the end.

        Raises:
            IllegalEventError: the state does not allow the event; nothing has changed.
        """
        if self.state is RequestState.DONE and not isinstance(event, PairPlaced | WorkerFound):
            return []
        try:
            pair = self._pair
            if pair is not None and type(event) in pair.HANDLERS:
                outcome = pair.HANDLERS[type(event)](pair, event, now_s)
                if outcome is not None:
                    self._reached(pair, outcome)
            else:
                self._HANDLERS[type(event)](self, event, now_s)
        except BatonError as error:
            self._end(End(error=error))
        except IllegalEventError:
            self._out.take()
            raise
        return self._out.take()

    def _arrived(self, _: Arrived, __: float) -> None:
        self.move(RequestStep.ARRIVE)
        self._placing = self._out.number()
        self._out.append(Reserve(self._placing))

    def _placed(self, event: PairPlaced, now_s: float) -> None:
        """Start on this pair, with the tokens that the client already has."""
        migration = self._migration
        if self._pair is not None or event.number != self._awaited:
            self._out.release(event.source)
            self._out.release(event.pool)
            return
        self.move(RequestStep.PLACE)
        self._num_before = len(self.token_ids)
        self._pair = RequestPair(event, self._progress, self._limits, self._out)
        self._pair.start(now_s)
        if migration is not None and migration.retry_reason:
            reason, error = migration.retry_reason, str(migration.error)
            self._out.append(NoteRetry(WorkerRole.DECODE, reason, error))

    @property
    def _awaited(self) -> int:
        """Return the number of the wait for a pair; 0 if there is none."""
        if self.state is RequestState.ADMITTING:
            return self._placing
        if self.state is RequestState.MIGRATING and self._migration is not None:
            return self._migration.number
        return 0

    def _not_admitted(self, event: NotAdmitted, _: float) -> None:
        if self.state is not RequestState.ADMITTING:
            raise IllegalEventError(f"admission refused a request in state {self.state.value}")
        raise event.error

    def _reached(self, pair: RequestPair, outcome: PairOutcome) -> None:
        if isinstance(outcome, PoolLost):
            self._migrate(pair, outcome)
        elif isinstance(outcome, Joined):
            self._count_migration("resumed")
        elif outcome is not None:
            self._end(outcome)

    def _migrate(self, pair: RequestPair, lost: PoolLost) -> None:
        """Search for another pair.

        Raises:
            BatonError: no other pair can help; PeerLostError if too many pools were lost.
        """
        pair.give_up()
        self._count_migration("failed")
        error = lost.error
        if not isinstance(error, UnavailableError | RequestAborted):
            raise error
        reason = move_reason(error)
        self._num_lost += reason is not MoveReason.DRAINED
        if reason is not MoveReason.STALLED:
            self._out.append(MarkLost(lost.pool, str(error)))
        final = PeerLostError(str(error))
        self._migration = Migration(self._out.number(), reason, final, lost.retry_reason)
        if self._num_lost > self._limits.migrations:
            raise final
        self._search_pair(self._migration, lost.pool)

    def _preempted(self, _: Preempted, __: float) -> None:
        pair, pool = self._pair, self.preemptible_on
        if pair is None or pool is None:
            return
        pair.give_up()
        error = PeerLostError("no workers are left on which the preempted request could resume")
        self._migration = Migration(self._out.number(), MoveReason.PREEMPTED, error, "")
        self._search_pair(self._migration, pool)

    def _search_pair(self, migration: Migration, pool: BookedWorker) -> None:
        self.move(RequestStep.MIGRATE)
        self._pair = None
        gives_way = migration.reason is MoveReason.PREEMPTED
        self._out.append(SearchPair(migration.number, pool, gives_way))

    def _found_late(self, event: WorkerFound, _: float) -> None:
        self._out.release(event.worker)

    def _search_failed(self, event: SearchFailed, _: float) -> None:
        if self._migration is not None and event.number == self._awaited:
            raise self._migration.error

    def _stopped(self, event: ClientStopped, _: float) -> None:
        # The workers would generate further tokens: closing the streams is the abort.
        self._end(End(event.finish))

    def _aborted(self, _: Aborted, __: float) -> None:
        self._end(End(generation_pb2.GenerateFinish(reason=types_pb2.FINISH_REASON_ABORTED)))

    def _deadline_passed(self, _: DeadlinePassed, __: float) -> None:
        error = DeadlineError(f"the request did not end within its {self._timeout_s:g} s")
        self._end(End(error=error))

    def _client_gone(self, _: ClientGone, __: float) -> None:
        self._end(End())

    def _command_failed(self, event: CommandFailed, _: float) -> None:
        self._end(End(error=event.error))

    def _end(self, end: End) -> None:
        """End the request: nothing of it stays open or booked."""
        if self._pair is not None:
            self._pair.close()
        elif self._awaited:
            self._out.append(Close(self._awaited))
        self._count_migration("failed")
        self.move(RequestStep.END)
        self._pair = None
        self._out.append(end)

    def _count_migration(self, outcome: str) -> None:
        """Count the outcome of the migration under way, if there is one."""
        if self._migration is not None:
            self._out.append(NoteMigration(self._migration.reason.value, outcome))
            self._migration = None

    def _dropped(self, _: RequestEvent, __: float) -> None:
        """Drop an event of something that was closed."""

    _HANDLERS: ClassVar[Mapping[type[RequestEvent], Callable[[Any, Any, float], None]]] = {
        Arrived: _arrived,
        PairPlaced: _placed,
        NotAdmitted: _not_admitted,
        ClientStopped: _stopped,
        Preempted: _preempted,
        Aborted: _aborted,
        DeadlinePassed: _deadline_passed,
        ClientGone: _client_gone,
        CommandFailed: _command_failed,
        # Without a pair:
        Received: _dropped,
        StreamEnded: _dropped,
        ReplyOverdue: _dropped,
        LinkChecked: _dropped,
        WorkerFound: _found_late,
        SearchFailed: _search_failed,
    }
