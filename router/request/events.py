"""The events that a request's machine takes, and the commands that it returns.

Streams to workers, searches and the wait for admission have numbers, from one counter of the
request. A number is never used again, so an event of something that was closed is recognized.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from protos import decode_pb2, generation_pb2, prefill_pb2, transfer_pb2, types_pb2
from router.workers.worker import WorkerRole
from runtime.errors import BatonError


class BookedWorker(Protocol):
    """A request's place on a worker, booked until `Release`."""

    @property
    def address(self) -> str: ...
    @property
    def compatibility(self) -> str: ...
    @property
    def num_cached(self) -> int: ...


# Events.


@dataclass(frozen=True, slots=True)
class Arrived:
    """The request is to be served."""


@dataclass(frozen=True, slots=True)
class PairPlaced:
    """A pair is booked, by admission or for a migration.

    `may_compute_rest`: the pool may prefill the rest of this prompt, because it is short or because
    both workers are one.
    """

    number: int
    source: BookedWorker
    pool: BookedWorker
    may_compute_rest: bool = False


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """Admission refused the request."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class WorkerFound:
    """A search for another worker has booked one.

    `has_started_over`: all pools had refused, and the search began again with all of them.
    """

    number: int
    worker: BookedWorker
    has_started_over: bool = False


@dataclass(frozen=True, slots=True)
class SearchFailed:
    """A search for another worker or pair has found none in time."""

    number: int


@dataclass(frozen=True, slots=True)
class LinkChecked:
    """A failed handoff was recorded. `is_fed`: a source is left for the pool, or for no pool."""

    number: int
    is_fed: bool


class Received(NamedTuple):
    """A message from a worker."""

    number: int
    message: prefill_pb2.PrefillEvent | decode_pb2.DecodeEvent


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The end of a worker's stream: regular if `error` is None."""

    number: int
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class ReplyOverdue:
    """A pool's reply is overdue: `RequestMachine.due_at_s` has passed."""


@dataclass(frozen=True, slots=True)
class ClientStopped:
    """The response is complete by the client's rules: it contains a stop string."""

    finish: generation_pb2.GenerateFinish


@dataclass(frozen=True, slots=True)
class Preempted:
    """The request gives way to a more urgent one, unless it has no pool that generates."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The client aborts the request."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The request's time is over."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client has left, or the router ends."""


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """A command could not be run, for example because the client does not read."""

    error: Exception


RequestEvent = (
    Arrived
    | PairPlaced
    | NotAdmitted
    | WorkerFound
    | SearchFailed
    | LinkChecked
    | Received
    | StreamEnded
    | ReplyOverdue
    | ClientStopped
    | Preempted
    | Aborted
    | DeadlinePassed
    | ClientGone
    | CommandFailed
)


# Commands.


@dataclass(frozen=True, slots=True)
class Reserve:
    """Book a pair through admission: `PairPlaced` or `NotAdmitted` follows."""

    number: int


@dataclass(frozen=True, slots=True)
class OpenPrefill:
    """Open a stream with the prompt to a prefill worker."""

    number: int
    worker: BookedWorker


@dataclass(frozen=True, slots=True)
class OpenDecode:
    """Open a stream to a decode pool. Without a source, ask it to prefill the rest of the prompt.

    `replayed`: output tokens after the first that the client already has.
    """

    number: int
    worker: BookedWorker
    source: transfer_pb2.SourceTerms | None
    replayed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a stream. `is_last`: the worker ends the stream by itself after it."""

    number: int
    message: prefill_pb2.PrefillInput | decode_pb2.DecodeInput
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """Close a stream, or cancel a search. `is_ending`: the worker ends the stream by itself."""

    number: int
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """Release a booking. `is_computed`: the worker has computed the prompt. Idempotent."""

    worker: BookedWorker
    is_computed: bool = False


@dataclass(frozen=True, slots=True)
class MarkLost:
    """Do not use the worker until it reports again."""

    worker: BookedWorker
    reason: str


@dataclass(frozen=True, slots=True)
class CheckLink:
    """Record that these workers cannot hand over to each other: `LinkChecked` follows."""

    number: int
    source: BookedWorker
    pool: BookedWorker


@dataclass(frozen=True, slots=True)
class SearchPrefill:
    """Search for a prefill worker for this pool, if possible not one in `tried`."""

    number: int
    pool: BookedWorker
    tried: frozenset[str]


@dataclass(frozen=True, slots=True)
class SearchDecode:
    """Search for a decode pool that fits `compatibility`, not in `tried` while there is another.

    The time is counted from `since_s`, the first refusal. `is_full`: the last one was for want of
    capacity.
    """

    number: int
    compatibility: str
    tried: frozenset[str]
    since_s: float
    is_full: bool


@dataclass(frozen=True, slots=True)
class SearchPair:
    """Search for a pair in place of the one whose pool is lost, if possible with another pool.

    `gives_way`: the request was preempted, and waits for its turn.
    """

    number: int
    lost: BookedWorker
    gives_way: bool = False


class Emit(NamedTuple):
    """Send tokens to the client. `is_decoded`: the decode pool generated them."""

    tokens: types_pb2.TokenChunk
    is_decoded: bool


@dataclass(frozen=True, slots=True)
class EmitScores:
    """Send prompt scores to the client when it has room, then confirm them on the stream."""

    number: int
    scores: types_pb2.PromptLogprobs


class Milestone(StrEnum):
    """Points of a request's life that are measured."""

    PLACED = "placed"
    STARTED = "started"
    COMPUTED = "computed"
    RESERVED = "reserved"  # the pool has memory
    DESTINATION = "destination"  # its terms went to the current source
    COMMITTED = "committed"
    LOCAL = "local"  # the pool prefills the rest of the prompt itself
    FINISHED = "finished"
    MOVED = "moved"  # the pair is given up


@dataclass(frozen=True, slots=True)
class Note:
    """Record a milestone, with the event that made it."""

    milestone: Milestone
    source: BookedWorker
    pool: BookedWorker
    message: prefill_pb2.PrefillEvent | decode_pb2.DecodeEvent | None = None


@dataclass(frozen=True, slots=True)
class NoteRetry:
    """Count a retry of a role, with the reason of the failed attempt; log its error."""

    role: WorkerRole
    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class NoteMigration:
    """Count the outcome of a migration."""

    reason: str
    outcome: str


@dataclass(frozen=True, slots=True)
class End:
    """End the request: with a finish, with an error, or silently if the client is gone. Last."""

    finish: generation_pb2.GenerateFinish | None = None
    error: Exception | None = None


Command = (
    Reserve
    | OpenPrefill
    | OpenDecode
    | Send
    | Close
    | Release
    | MarkLost
    | CheckLink
    | SearchPrefill
    | SearchDecode
    | SearchPair
    | Emit
    | EmitScores
    | Note
    | NoteRetry
    | NoteMigration
    | End
)


class Outbox(list[Command]):
    """Commands of the event that is handled, and the counter of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._last_number = 0

    def release(self, worker: BookedWorker) -> None:
        """Add the release of a booking."""
        self.append(Release(worker))

    def number(self) -> int:
        """Return a number that was never used."""
        self._last_number += 1
        return self._last_number

    def take(self) -> list[Command]:
        """Return and forget the commands."""
        commands = self[:]
        self.clear()
        return commands
