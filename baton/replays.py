"""Changes to a recorded load before it is replayed: more users, other starts, pauses and lengths."""

import random
from collections.abc import Sequence
from dataclasses import replace

from baton.workload import Arrivals, Planned
from runtime.errors import ConfigError


def superposed(planned: Sequence[Planned], copies: int, *, seed: int) -> list[Planned]:
    """Return `copies` copies of a load at once, in order of time.

    Each copy stands for other users: it has its own blocks and conversations and starts at another
    point of the load, so that bursts do not coincide. The length of the load and the first copy do
    not change.
    """
    rng = random.Random(seed)
    begins = _begins(planned)
    end_s = max(begins, default=0.0)
    step = 1 + max((block for item in planned for block in item.blocks), default=0)
    num_sessions = 1 + max((item.turn.session for item in planned if item.turn), default=-1)
    together = list(planned)
    for copy in range(1, copies):
        later_s = rng.uniform(0.0, end_s)
        together += [
            replace(
                item,
                at_s=item.at_s - begin_s + ((begin_s + later_s) % end_s if end_s else 0.0),
                blocks=tuple(block + copy * step for block in item.blocks),
                turn=item.turn
                and replace(item.turn, session=item.turn.session + copy * num_sessions),
            )
            for item, begin_s in zip(planned, begins, strict=True)
        ]
    return sorted(together, key=lambda item: item.at_s)


def _begins(planned: Sequence[Planned]) -> list[float]:
    """Return the time of each request's conversation, which is its own without one."""
    first_s: dict[int, float] = {}
    for item in planned:
        if item.turn is not None:
            session = item.turn.session
            first_s[session] = min(first_s.get(session, item.at_s), item.at_s)
    return [item.at_s if item.turn is None else first_s[item.turn.session] for item in planned]


def begun(planned: Sequence[Planned], arrivals: Arrivals, *, seed: int) -> list[Planned]:
    """Return conversations that begin at random times, if the recording does not state any."""
    sessions = list(dict.fromkeys(item.turn.session for item in planned if item.turn))
    starts_s = dict(zip(sessions, arrivals.times(len(sessions), random.Random(seed)), strict=True))
    return sorted(
        (
            item
            if item.turn is None
            else replace(item, at_s=item.at_s + starts_s[item.turn.session])
            for item in planned
        ),
        key=lambda item: item.at_s,
    )


def impatient(planned: Sequence[Planned], max_pause_s: float) -> list[Planned]:
    """Return the load with pauses of at most `max_pause_s` before the turns of conversations."""
    return [
        item
        if item.turn is None
        else replace(item, turn=replace(item.turn, pause_s=min(item.turn.pause_s, max_pause_s)))
        for item in planned
    ]


def shrunk(planned: Sequence[Planned], factor: int) -> list[Planned]:
    """Return the load with lengths divided by `factor`; common prefixes are divided alike.

    Raises:
        ConfigError: the factor does not divide the length of the trace's blocks.
    """
    for size in sorted({item.block_tokens for item in planned if item.blocks}):
        if size % factor:
            raise ConfigError(
                f"shrink must divide the {size} tokens of the trace's blocks, got {factor}",
                field="shrink",
            )
    return [
        replace(
            item,
            prompt_tokens=max(1, item.prompt_tokens // factor),
            output_tokens=max(1, item.output_tokens // factor),
            block_tokens=max(1, item.block_tokens // factor),
        )
        for item in planned
    ]
