"""Recordings of agents: conversations with the times of every request and response.

The form is that of the kv-cache-tester's traces and of the data sets in its form: an object per
conversation whose `requests` have `t` (seconds after its start), `in` and `out` (tokens),
`hash_ids` (of blocks of `block_size` tokens), `api_time` (seconds until the response) and
`think_time` (seconds before the request). An entry with `requests` of its own is a sub-agent.

A request was sent after certain responses, and is sent after the same ones again: those that had
arrived by then, and that no request had followed yet.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from baton.workload import Planned, Turn

DEFAULT_BLOCK_TOKENS = 64
_SLACK_S = 1.0  # times after the start are recorded in whole seconds


@dataclass(frozen=True)
class _RecordedCall:
    """One request of a recording; times are seconds after the start of the conversation."""

    at_s: float
    end_s: float  # of its response
    pause_s: float | None  # before it, as the agent recorded it
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


BlockNumbers = defaultdict[int, int]
"""Numbers of blocks by their ids in a recording; a new id takes the next number."""


def conversation(
    values: Mapping[str, Any], session: int, shared: BlockNumbers
) -> tuple[list[Planned], int]:
    """Return the turns of a recorded conversation, and the number of requests without a response.

    `shared` has the numbers of ids that mean the same in all conversations (`hash_id_scope`
    "global"). Other ids get numbers of their own.

    Raises:
        ValueError: a field is invalid.
        KeyError: a field is missing.
        TypeError: a field is of another type.
    """
    is_global = values.get("hash_id_scope") == "global"
    numbers = shared if is_global else defaultdict(shared.default_factory)
    size = int(values.get("block_size", DEFAULT_BLOCK_TOKENS))
    if size < 1:
        raise ValueError(f"block_size must be at least 1, got {size}")
    every = sorted(_calls(values["requests"], 0.0, numbers), key=lambda call: call.at_s)
    calls = [call for call in every if call.prompt_tokens and call.output_tokens]
    turns = []
    for number, call in enumerate(calls):
        after = _after(calls[:number], call.at_s)
        pause_s = max(call.at_s - max((calls[each].end_s for each in after), default=0.0), 0.0)
        if call.pause_s is not None and abs(call.pause_s - pause_s) <= _SLACK_S:
            pause_s = call.pause_s
        turns.append(
            Planned(
                call.at_s,
                call.prompt_tokens,
                call.output_tokens,
                call.blocks,
                turn=Turn(session, number, after, pause_s),
                block_tokens=size,
            )
        )
    return turns, len(every) - len(calls)


def _calls(
    entries: Sequence[Mapping[str, Any]], offset_s: float, numbers: BlockNumbers
) -> Iterator[_RecordedCall]:
    """Yield the requests of an agent and of its sub-agents.

    A sub-agent's times count from its own start, or from that of the conversation.
    """
    for entry, following in zip_longest(entries, entries[1:]):
        at_s = offset_s + float(entry["t"])
        if "requests" in entry:
            inner = entry["requests"]
            is_relative = bool(inner) and float(inner[0]["t"]) < float(entry["t"])
            yield from _calls(inner, at_s if is_relative else offset_s, numbers)
            continue
        yield _RecordedCall(
            at_s,
            at_s + _response_s(entry, following),
            float(entry["think_time"]) if "think_time" in entry else None,
            int(entry["in"]),
            int(entry["out"]),
            tuple(numbers[int(block)] for block in entry.get("hash_ids", ())),
        )


def _response_s(entry: Mapping[str, Any], following: Mapping[str, Any] | None) -> float:
    """Return the time of a response; if it is not recorded, until the next request's pause."""
    if "api_time" in entry:
        return float(entry["api_time"])
    if following is None:
        return 0.0
    pause_s = float(following.get("think_time", 0.0))
    return max(float(following["t"]) - float(entry["t"]) - pause_s, 0.0)


def _after(calls: Sequence[_RecordedCall], at_s: float) -> tuple[int, ...]:
    """Return the requests whose responses had arrived, and had not been followed by another one."""
    ended = [number for number, call in enumerate(calls) if call.end_s <= at_s + _SLACK_S]
    if not ended:
        return ()
    latest = ended[-1]  # it waited for those that had ended by then
    return tuple(
        number
        for number in ended
        if number == latest or calls[number].end_s > calls[latest].at_s + _SLACK_S
    )
