"""Outcomes of a storm's requests, compared with a single process's responses."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from baton.values import Chunk, Completion, Event, Finish
from baton.wire import completion_of
from bench.storm.schedule import StormFault
from bench.storm.traffic import Manner, Seen
from tests.support.cluster.queries import comparable

Truth = Sequence[tuple[Completion, ...]]  # the right responses of a question, with all choices

# Errors that tell a client that its request was not served, and that it may retry.
REFUSALS = frozenset({"UNAVAILABLE", "DRAINING", "OUT_OF_CAPACITY"})
DAMAGE = "DIGEST_MISMATCH"
REPLACED = "its adapter has changed"  # in the error of a response that resumes
PACE_S = 0.5  # a request without a message for longer is stalled throughout
HOLD_S = 1.0  # period of full service that counts as recovery
BACK_SHARE = 0.95
_TICK_S = 0.05


class Fate(StrEnum):
    RIGHT = "right"
    REFUSED = "refused"  # with a status that says so, and without a token before it
    DAMAGED = "damaged"  # DATA_LOSS: a bit was damaged in transit, and the error reports it
    REPLACED = "replaced"  # its adapter changed, and then all workers with the old version died
    LOST = "lost"
    WRONG = "wrong"
    HUNG = "hung"


def fate(seen: Seen, truth: Truth) -> Fate:
    """Return the outcome of a patient client's request."""
    if not begins_right(seen.events, truth):
        return Fate.WRONG
    if seen.is_hung:
        return Fate.HUNG
    if seen.has_finished:
        return Fate.RIGHT if seen.response in truth else Fate.WRONG
    if seen.error == DAMAGE:
        return Fate.DAMAGED
    if len(truth) > 1 and REPLACED in seen.text:
        return Fate.REPLACED
    return Fate.REFUSED if seen.error in REFUSALS and not seen.num_tokens else Fate.LOST


def begins_right(events: Sequence[Event], truth: Truth) -> bool:
    """Return whether a right response begins with these events."""
    chunks = [event for event in events if isinstance(event, Chunk)]
    return any(
        all(
            _begins(choice, [chunk for chunk in chunks if chunk.index == index])
            for index, choice in enumerate(right)
        )
        for right in truth
    )


def difference(seen: Seen, truth: Truth) -> str:
    """Return where a wrong response differs from the first right one: a choice, a field and values."""
    for index, choice in enumerate(truth[0]):
        chunks = [event for event in seen.events if event.index == index]
        if not chunks or not isinstance(chunks[-1], Finish):
            return f"choice {index} has not finished"
        found = comparable(completion_of(chunks))
        for field in fields(Completion):
            values = getattr(found, field.name), getattr(choice, field.name)
            if values[0] != values[1]:
                return f"choice {index}, {field.name}: {values[0]}, not {values[1]}"
    return "more choices than requested"


def _begins(choice: Completion, chunks: Sequence[Chunk]) -> bool:
    found = completion_of([*chunks, choice.finish])
    return (
        found.token_ids == choice.token_ids[: len(found.token_ids)]
        and found.logprobs == choice.logprobs[: len(found.logprobs)]
        and found.prompt_logprobs == choice.prompt_logprobs[: len(found.prompt_logprobs)]
        # An aborted response may end in a part of a stop string.
        and (choice.text + (choice.finish.stop_string or "")).startswith(found.text)
    )


@dataclass(frozen=True)
class Counts:
    """Counts over all requests: those that must be right, and outcomes of other clients."""

    fates: Counter[Fate]
    num_requests: int
    num_wrong: int  # of clients of any kind
    num_hung: int
    num_cached: int  # right responses whose prompt began with cached tokens
    num_aborted: int  # whose clients called `Abort`, and that ended thereby
    num_changed: int  # right responses of an adapter's other version
    hostile: Counter[str]

    @classmethod
    def of(cls, requests: Sequence[Seen], truths: Sequence[Truth]) -> "Counts":
        """Return the counts; `truths` are by question."""
        patient = [
            (seen, fate(seen, truths[seen.coming.question]))
            for seen in requests
            if seen.coming.manner is Manner.PATIENT
        ]
        fates = Counter(became for _, became in patient)
        wrong = sum(
            seen.coming.manner is Manner.ABORTING
            and not begins_right(seen.events, truths[seen.coming.question])
            for seen in requests
        )
        hostile = [seen for seen in requests if seen.coming.manner is Manner.HOSTILE]
        return cls(
            fates,
            len(requests),
            fates[Fate.WRONG] + wrong,
            sum(seen.is_hung for seen in requests),
            sum(became is Fate.RIGHT and seen.num_cached > 0 for seen, became in patient),
            sum(seen.is_aborted for seen in requests),
            sum(
                became is Fate.RIGHT and seen.response != truths[seen.coming.question][0]
                for seen, became in patient
            ),
            Counter(seen.error or "finished" for seen in hostile),
        )


def stalls(seen: Seen) -> list[tuple[float, float]]:
    """Return the gaps in which a client waited longer than `PACE_S`."""
    times = [seen.sent_s, *seen.message_s]
    if seen.ended_s is not None and not seen.has_finished:
        times.append(seen.ended_s)
    return [(begin, end) for begin, end in itertools.pairwise(times) if end - begin > PACE_S]


class Pace:
    """Share of running requests at pace, at any time of a storm."""

    def __init__(self, requests: Sequence[Seen]) -> None:
        patient = [
            seen
            for seen in requests
            if seen.coming.manner is Manner.PATIENT and seen.ended_s is not None
        ]
        self._spans = [(seen.sent_s, seen.ended_s or seen.sent_s) for seen in patient]
        self._stalls = [gap for seen in patient for gap in stalls(seen)]

    def served(self, at_s: float) -> float:
        """Return the share of running requests that were not stalled; 1 without requests."""
        under_way = sum(begin <= at_s < end for begin, end in self._spans)
        stalled = sum(begin <= at_s < end for begin, end in self._stalls)
        return 1 - stalled / under_way if under_way else 1.0

    def mean(self, begin_s: float, end_s: float) -> float:
        ticks = max(1, round((end_s - begin_s) / _TICK_S))
        return sum(self.served(begin_s + tick * _TICK_S) for tick in range(ticks)) / ticks

    def recovery_s(self, fault_s: float, until_s: float) -> float:
        """Return the seconds from a fault to recovery.

        The share served must be `BACK_SHARE` of that in the two seconds before, for `HOLD_S`.
        Without recovery, return the time until `until_s`.
        """
        wanted = BACK_SHARE * self.mean(fault_s - 2.0, fault_s)
        since_s = at_s = fault_s
        while at_s < until_s:
            if self.served(at_s) < wanted:
                since_s = at_s + _TICK_S
            elif at_s - since_s >= HOLD_S:
                break
            at_s += _TICK_S
        return since_s - fault_s


def recoveries(
    pace: Pace, faults: Sequence[StormFault], start_s: float, end_s: float
) -> list[float]:
    """Return the recovery of each fault, by its index in `faults`.

    The effects of the next fault are counted with that one.
    """
    times = [start_s + fault.at_s for fault in faults]
    return [
        pace.recovery_s(at_s, min([other for other in times if other > at_s] + [end_s]))
        for at_s in times
    ]
