"""Random histories of a request: workers that follow the protocol, and faults at every point."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from protos import generation_pb2, types_pb2
from router.request import events as ev
from runtime.errors import (
    BatonError,
    CapacityError,
    DeadlineError,
    DrainingError,
    FieldViolation,
    HandoffError,
    IncompatiblePeerError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
    RequestAborted,
    StalledError,
)
from tests.router.request.machine import world as w
from tests.router.request.machine.world import FIRST, World

NUM_TOKENS = 6
MAX_STEPS = 500
ERRORS: tuple[Callable[[], BatonError | None], ...] = (
    lambda: None,
    lambda: PeerLostError("lost"),
    lambda: PeerLostError("lost again"),
    lambda: DrainingError("drains"),
    lambda: CapacityError("full", resource="pages"),
    lambda: StalledError("stalled"),
    lambda: IncompatiblePeerError("other tokens"),
    lambda: HandoffError("no link"),
    lambda: HandoffError("no link"),
    lambda: RequestAborted("handed back"),
)
FINAL_ERRORS: tuple[Callable[[], BatonError], ...] = (
    lambda: InvalidRequestError(FieldViolation("prompt", "is bad")),
    lambda: InternalError("a bug"),
    lambda: DeadlineError("late"),
)


@dataclass
class PrefillModel:
    """What a prefill worker has said of a prompt."""

    has_started: bool = False
    num_scored: int = 0
    has_first_token: bool = False
    has_sent: bool = False
    is_muted: bool = False


@dataclass
class DecodeModel:
    """What a decode pool has said of a request."""

    epoch: int = -1  # of the latest destination terms
    has_joined: bool = False
    position: int = 0
    is_muted: bool = False


Step = Callable[[], object]


@dataclass
class History:
    """One random history. `seed` alone decides it."""

    seed: int
    num_faults: int = 12
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        num_resumed = self.rng.choice((0, 0, 0, 1, 3))
        self.world = World(tuple(range(FIRST, FIRST + num_resumed)))
        self.prefills: dict[int, PrefillModel] = {}
        self.decodes: dict[int, DecodeModel] = {}
        self.landed: set[tuple[str, int]] = set()
        self.seen: list[ev.RequestEvent] = []
        self.garbled: set[int] = set()  # streams of workers that broke the protocol
        self.is_spoiled = False  # whether a fault may end the request

    def run(self) -> World:
        """Play the history to its end, and some late events."""
        self.feed(ev.Arrived())
        for _ in range(MAX_STEPS):
            if self.world.end is not None:
                break
            self.step()
        assert self.world.end is not None, "it does not end"
        self.late()
        return self.world

    def step(self) -> None:
        """Play one step: a fault, if any are left, or progress."""
        if self.num_faults and self.rng.random() < 0.3:
            self.num_faults -= 1
            self.rng.choice(self.faults())()
        else:
            steps = self.progress()
            if steps:
                self.rng.choice(steps)()
            else:
                self.unblock()
        while self.world.checks and self.world.end is None:
            check = self.world.checks.pop(0)
            self.feed(ev.LinkChecked(check.number, self.rng.random() < 0.5))
        self.check_owed()

    def check_owed(self) -> None:
        """Check that a reply that the pool owes has a time limit."""
        for number, stream in self.world.decode.items():
            model = self.decodes.setdefault(number, DecodeModel())
            if model.has_joined:
                continue
            if number not in self.garbled and model.epoch + 1 < stream.num_offers:
                assert self.world.machine.due_at_s is not None, "destination terms without a limit"

    def progress(self) -> list[Step]:
        """Return what may happen next if nothing fails."""
        steps: list[Step] = []
        for number, wait in self.world.waits.items():
            steps.append(lambda number=number, wait=wait: self.found(number, wait))  # type: ignore[misc]
        for number in self.world.prefill:
            steps += self.prefill_steps(number)
        for number in self.world.decode:
            steps += self.decode_steps(number)
        return steps

    def prefill_steps(self, number: int) -> list[Step]:
        stream = self.world.prefill[number]
        model = self.prefills.setdefault(number, PrefillModel())
        steps: list[Step] = []
        if model.is_muted:
            return steps
        if stream.is_ending:
            return [lambda: self.feed(ev.StreamEnded(number))]
        if not model.has_started:
            return [lambda: self.say(model, "has_started", w.started(number))]
        if not model.has_first_token:
            steps.append(lambda: self.say(model, "has_first_token", w.first_token(number)))
            if model.num_scored < 2:
                steps.append(lambda: self.score(number, model))
        if stream.destination is not None and not model.has_sent:
            steps.append(lambda: self.send(number, model))
        return steps

    def score(self, number: int, model: PrefillModel) -> None:
        model.num_scored += 1
        self.feed(w.scored(number))

    def send(self, number: int, model: PrefillModel) -> None:
        destination = self.world.prefill[number].destination
        assert destination is not None
        self.landed.add((destination.session_id, destination.epoch))
        self.say(model, "has_sent", w.sent(number))

    def say(self, model: PrefillModel, fact: str, event: ev.Received) -> None:
        setattr(model, fact, True)
        self.feed(event)

    def decode_steps(self, number: int) -> list[Step]:
        stream = self.world.decode[number]
        model = self.decodes.setdefault(number, DecodeModel())
        if model.is_muted:
            return []
        if model.has_joined:
            return [lambda: self.decode_more(number, model)]
        if stream.source is None:
            return [
                lambda: self.join(number, model, w.local(number)),
                lambda: self.feed(ev.StreamEnded(number, CapacityError("full", resource="it"))),
            ]
        steps: list[Step] = []
        if model.epoch + 1 < stream.num_offers:
            steps.append(lambda: self.reserve(number, model, stream.num_offers - 1))
        if "first_token" in stream.inputs and (str(number), model.epoch) in self.landed:
            model.position = 1 + len(stream.replayed)
            steps.append(
                lambda: self.join(number, model, w.committed(number, 1 + len(stream.replayed)))
            )
        return steps

    def reserve(self, number: int, model: DecodeModel, newest: int) -> None:
        model.epoch = self.rng.randint(model.epoch + 1, newest)
        self.feed(w.destination(number, model.epoch))

    def join(self, number: int, model: DecodeModel, event: ev.Received) -> None:
        model.has_joined = True
        self.feed(event)

    def decode_more(self, number: int, model: DecodeModel) -> None:
        if model.position >= NUM_TOKENS:
            self.feed(w.finished(number, model.position))
            return
        count = self.rng.randint(1, min(3, NUM_TOKENS - model.position))
        position = model.position
        model.position += count
        self.feed(w.tokens(number, position, count))

    def found(self, number: int, wait: ev.RequestEvent | ev.Command) -> None:
        """Let a search or admission succeed."""
        self.world.waits.pop(number)
        if isinstance(wait, ev.Reserve | ev.SearchPair):
            cached = self.rng.choice((0, 0, 64))
            self.world.place(number, num_cached=cached, may_compute_rest=self.rng.random() < 0.5)
        elif isinstance(wait, ev.SearchPrefill):
            self.feed(ev.WorkerFound(number, self.world.book("prefill")))
        else:
            has_started_over = self.rng.random() < 0.5
            self.feed(ev.WorkerFound(number, self.world.book("decode"), has_started_over))

    def unblock(self) -> None:
        """Resolve what only silence can: an overdue reply, or the loss of a silent worker."""
        due_at_s = self.world.machine.due_at_s
        if due_at_s is not None:
            self.world.now_s = max(self.world.now_s, due_at_s)
            self.feed(ev.ReplyOverdue())
            return
        silent = [
            number
            for models in (self.prefills, self.decodes)
            for number, model in models.items()
            if model.is_muted and (number in self.world.prefill or number in self.world.decode)
        ]
        assert silent, "nothing can happen any more"
        self.feed(ev.StreamEnded(self.rng.choice(silent), PeerLostError("silent")))

    # Faults.

    def faults(self) -> list[Step]:
        """Return faults that are possible now."""
        faults: list[Step] = [self.repeat, self.repeat, self.overdue, self.preempt]
        numbers = [*self.world.prefill, *self.world.decode]
        if numbers:
            number = self.rng.choice(numbers)
            faults += [lambda: self.end(number)] * 4
            faults += [lambda: self.mute(number)] * 2
            faults.append(lambda: self.garble(number))
        if self.world.waits:
            faults.append(self.fail_search)
        if self.rng.random() < 0.1:
            faults.append(self.finish)
        return faults

    def end(self, number: int) -> None:
        """End a stream with an error."""
        if self.rng.random() < 0.03:
            self.is_spoiled = True
            self.feed(ev.StreamEnded(number, self.rng.choice(FINAL_ERRORS)()))
        else:
            self.feed(ev.StreamEnded(number, self.rng.choice(ERRORS)()))

    def mute(self, number: int) -> None:
        """Let a worker fall silent, alive as it seems."""
        if number in self.world.prefill:
            self.prefills.setdefault(number, PrefillModel()).is_muted = True
        else:
            self.decodes.setdefault(number, DecodeModel()).is_muted = True

    def repeat(self) -> None:
        """Deliver an earlier event again: a duplicate, or a late one of a closed stream."""
        if self.seen:
            self.feed(self.rng.choice(self.seen))

    def overdue(self) -> None:
        """Report a reply as overdue, due or not."""
        self.feed(ev.ReplyOverdue())

    def preempt(self) -> None:
        """Have the request give way, whether it can or not."""
        self.feed(ev.Preempted())

    def garble(self, number: int) -> None:
        """Send something that the protocol does not allow."""
        self.garbled.add(number)
        position = self.rng.choice((0, len(self.world.tokens) + 1, 2**32 - 1))
        if number in self.world.prefill:
            choices = [w.tokens(number, position), w.first_token(number), w.sent(number)]
            if self.world.tokens:
                choices.append(w.first_token(number, FIRST + 7))
        else:
            choices = [
                w.tokens(number, position),
                w.committed(number, position),
                w.finished(number, position),
                w.local(number, position),
                w.destination(number, self.rng.choice((0, 1, 2**32 - 1))),
                w.started(number),
            ]
        event = self.rng.choice(choices)
        if event.message.WhichOneof("event") in {"finished", "first_token", "sent", "local"}:
            self.is_spoiled = True
        self.feed(event)

    def fail_search(self) -> None:
        """Let a search find nothing, or admission refuse."""
        number, wait = self.rng.choice(list(self.world.waits.items()))
        if self.rng.random() < 0.5:
            return
        self.is_spoiled = True
        self.world.waits.pop(number)
        if isinstance(wait, ev.Reserve):
            self.feed(ev.NotAdmitted(CapacityError("full", resource="router queue")))
        else:
            self.feed(ev.SearchFailed(number))

    def finish(self) -> None:
        """End the request from outside."""
        self.is_spoiled = True
        stopped = generation_pb2.GenerateFinish(reason=types_pb2.FINISH_REASON_STOP)
        ends: tuple[ev.RequestEvent, ...] = (
            ev.Aborted(),
            ev.DeadlinePassed(),
            ev.ClientGone(),
            ev.ClientStopped(stopped),
            ev.CommandFailed(RequestAborted("the client has read nothing")),
        )
        self.feed(self.rng.choice(ends))

    def late(self) -> None:
        """Deliver events after the end: nothing may come of them."""
        end = self.world.end
        for event in self.rng.sample(self.seen, min(4, len(self.seen))):
            self.feed(event)
        for _ in range(2):
            self.world.machine.on(ev.Aborted(), self.world.now_s)
        self.feed(ev.WorkerFound(10**6, self.world.book("prefill")))
        self.world.place(10**6 + 1)
        assert self.world.end is end

    def feed(self, event: ev.RequestEvent) -> None:
        if isinstance(event, ev.Received | ev.StreamEnded | ev.SearchFailed):
            self.seen.append(event)
        self.events.append(type(event).__name__)
        if isinstance(event, ev.StreamEnded):
            self.world.prefill.pop(event.number, None)
            self.world.decode.pop(event.number, None)
        self.world.feed(event)
