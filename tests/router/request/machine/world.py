"""The account of a request machine's commands: what is booked, open, sent and emitted.

It runs no command. Every command is checked against what is open, so that a test of any history
notices a message to a closed stream, a number used twice, or anything left after the end.
"""

from dataclasses import dataclass, field
from typing import Any

from protos import decode_pb2, prefill_pb2, transfer_pb2, types_pb2
from router.request import events as ev
from router.request.machine import RequestMachine
from router.request.retries import FlowLimits
from router.request.transitions import IllegalEventError, RequestState
from runtime.errors import PeerLostError

LIMITS = FlowLimits(prefill_attempts=3, migrations=2, reserve_s=4.0, commit_s=30.0)
FIRST = 100  # token i of the response is FIRST + i


@dataclass(eq=False)
class FakeBooking:
    """A booking that counts nothing."""

    address: str
    compatibility: str = "digest"
    num_cached: int = 0


@dataclass
class OpenStream:
    """A stream that the machine has opened, and what it sent there."""

    worker: FakeBooking
    source: transfer_pb2.SourceTerms | None = None
    replayed: tuple[int, ...] = ()
    inputs: list[str] = field(default_factory=list)  # kinds of messages
    destination: transfer_pb2.DestinationTerms | None = None
    num_offers: int = 0
    is_ending: bool = False


class World:
    """A machine and the account of its commands."""

    def __init__(self, resumed: tuple[int, ...] = (), limits: FlowLimits = LIMITS) -> None:
        self.machine = RequestMachine(limits, 60.0, resumed)
        self.limits = limits
        self.now_s = 0.0
        self.booked: set[FakeBooking] = set()
        self.prefill: dict[int, OpenStream] = {}
        self.decode: dict[int, OpenStream] = {}
        self.waits: dict[int, ev.RequestEvent | ev.Command] = {}  # searches and admission
        self.checks: list[ev.CheckLink] = []
        self.tokens = list(resumed)
        self.scores = 0
        self.end: ev.End | None = None
        self.commands: list[ev.Command] = []  # of the latest event
        self.kinds: list[str] = []  # of all commands
        self.num_bookings = 0
        self.num_placed = 0
        self.attempts = 0  # of the current pair
        self._numbers: set[int] = set()

    # Events.

    def on(self, event: ev.RequestEvent) -> None:
        """Feed an event, and account for the commands."""
        before = self.snapshot
        try:
            self.commands = self.machine.on(event, self.now_s)
        except IllegalEventError:
            assert self.snapshot == before, "an illegal event has changed something"
            raise
        for command in self.commands:
            self._account(command)
        self.check()

    def feed(self, event: ev.RequestEvent) -> bool:
        """Feed an event as the flow does: a worker that breaks the protocol counts as lost.

        Returns whether the event was legal.
        """
        try:
            self.on(event)
        except IllegalEventError:
            assert isinstance(event, ev.Received)
            self.prefill.pop(event.number, None)
            self.decode.pop(event.number, None)
            self.on(ev.StreamEnded(event.number, PeerLostError("broke the protocol")))
            return False
        return True

    def book(self, role: str, num_cached: int = 0) -> FakeBooking:
        """Book a worker of a role."""
        self.num_bookings += 1
        booking = FakeBooking(f"{role}-{self.num_bookings}", num_cached=num_cached)
        self.booked.add(booking)
        return booking

    def place(self, number: int, *, num_cached: int = 0, may_compute_rest: bool = False) -> None:
        """Place the request on a new pair."""
        self.waits.pop(number, None)
        self.num_placed += 1
        self.attempts = 0
        pool = self.book("decode", num_cached)
        self.on(ev.PairPlaced(number, self.book("prefill"), pool, may_compute_rest))

    # The account.

    @property
    def snapshot(self) -> tuple[object, ...]:
        """Return the machine's state, as far as an illegal event may not change it."""
        pair = self.machine.pair
        halves = None if pair is None else (pair.source.state, pair.pool.state, pair.pool.due)
        return self.machine.state, halves, tuple(self.machine.token_ids)

    def check(self) -> None:
        """Check what must hold between any two events."""
        is_done = self.machine.state is RequestState.DONE
        assert is_done is (self.end is not None)
        if is_done:
            assert not self.booked, "a booking is left"
            assert not self.prefill, "a prefill stream is open"
            assert not self.decode, "a decode stream is open"
            assert not self.waits, "a search goes on"
            assert self.machine.due_at_s is None

    def _account(self, command: ev.Command) -> None:  # noqa: C901 - one case for each command
        self.kinds.append(type(command).__name__)
        if self.end is not None:
            assert isinstance(command, ev.Release), f"{command} after the end"
        match command:
            case ev.Reserve(number) | ev.SearchPair(number, _, _):
                self._fresh(number)
                self.waits[number] = command
            case ev.SearchPrefill(number, _, _) | ev.SearchDecode(number, _, _, _, _):
                self._fresh(number)
                self.waits[number] = command
            case ev.OpenPrefill(number, worker):
                self._fresh(number)
                assert worker in self.booked
                self.attempts += 1
                assert isinstance(worker, FakeBooking)
                self.prefill[number] = OpenStream(worker)
            case ev.OpenDecode(number, worker, source, replayed):
                self._fresh(number)
                assert worker in self.booked
                assert isinstance(worker, FakeBooking)
                assert list(replayed) == self.tokens[1:], "replayed is what the client has"
                self.decode[number] = OpenStream(worker, source, tuple(replayed), num_offers=1)
            case ev.Send(number, message, is_last):
                self._sent(number, message, is_last=is_last)
            case ev.Close(number, _):
                known: list[dict[int, Any]] = [self.prefill, self.decode, self.waits]
                assert number in self._numbers
                for opened in known:
                    opened.pop(number, None)
            case ev.Release(worker, _):
                assert isinstance(worker, FakeBooking)
                self.booked.discard(worker)
            case ev.CheckLink():
                self._fresh(command.number)
                self.checks.append(command)
            case ev.Emit(tokens, _):
                self.tokens.extend(tokens.token_ids)
            case ev.EmitScores():
                self.scores += 1
            case ev.End():
                self.end = command
            case _:
                pass

    def _fresh(self, number: int) -> None:
        assert number not in self._numbers, "a number is used twice"
        self._numbers.add(number)

    def _sent(
        self,
        number: int,
        message: prefill_pb2.PrefillInput | decode_pb2.DecodeInput,
        *,
        is_last: bool,
    ) -> None:
        stream = self.prefill.get(number) or self.decode.get(number)
        assert stream is not None, "a message to a closed stream"
        assert not stream.is_ending, "a message after the last one"
        kind = str(message.WhichOneof("input"))
        if kind == "first_token":
            assert "first_token" not in stream.inputs
        if isinstance(message, prefill_pb2.PrefillInput) and kind == "destination":
            stream.destination = message.destination
        if kind == "new_source":
            stream.num_offers += 1
        stream.inputs.append(kind)
        stream.is_ending = is_last


def started(number: int, cached: int = 0) -> ev.Received:
    """Return the start of a prompt."""
    terms = transfer_pb2.SourceTerms(compatibility="digest")
    message = prefill_pb2.PrefillStarted(terms=terms, cached_tokens=cached)
    return ev.Received(number, prefill_pb2.PrefillEvent(started=message))


def scored(number: int) -> ev.Received:
    """Return prompt scores."""
    return ev.Received(number, prefill_pb2.PrefillEvent(scored=types_pb2.PromptLogprobs()))


def first_token(number: int, token_id: int = FIRST) -> ev.Received:
    """Return the first token of a prefill worker."""
    token = prefill_pb2.PrefillFirstToken(token=types_pb2.TokenChunk(token_ids=[token_id]))
    return ev.Received(number, prefill_pb2.PrefillEvent(first_token=token))


def sent(number: int) -> ev.Received:
    """Return the report that every byte has left."""
    return ev.Received(number, prefill_pb2.PrefillEvent(sent=prefill_pb2.PrefillSent()))


def destination(number: int, epoch: int = 0) -> ev.Received:
    """Return the destination terms of an epoch."""
    terms = transfer_pb2.DestinationTerms(session_id=str(number), epoch=epoch)
    return ev.Received(number, decode_pb2.DecodeEvent(destination=terms))


def committed(number: int, position: int) -> ev.Received:
    """Return the commit."""
    message = decode_pb2.DecodeCommitted()
    return ev.Received(number, decode_pb2.DecodeEvent(position=position, committed=message))


def local(number: int, position: int = 0) -> ev.Received:
    """Return the word that the pool prefills the rest itself."""
    message = decode_pb2.DecodeLocal()
    return ev.Received(number, decode_pb2.DecodeEvent(position=position, local=message))


def tokens(number: int, position: int, count: int = 1) -> ev.Received:
    """Return decoded tokens, those of the response at this position."""
    first = FIRST + position % 1000
    chunk = types_pb2.TokenChunk(token_ids=range(first, first + count))
    return ev.Received(number, decode_pb2.DecodeEvent(position=position, tokens=chunk))


def finished(number: int, position: int) -> ev.Received:
    """Return the end of decoding."""
    message = decode_pb2.DecodeFinished(reason=types_pb2.FINISH_REASON_LENGTH)
    return ev.Received(number, decode_pb2.DecodeEvent(position=position, finished=message))
