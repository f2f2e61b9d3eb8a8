"""Every situation that a request can be in, and what each event does to it.

`EXPECTED` is written from the protocol of the workers. A cell is `source/pool` for the states that
follow, `=` if nothing changes, `migrating`, or `end:` with the reason of the error. A message of a
worker that is not listed is illegal if its stream is open.
"""

from collections.abc import Callable, Mapping

from router.request import events as ev
from runtime.errors import (
    BatonError,
    CapacityError,
    DrainingError,
    FieldViolation,
    HandoffError,
    IncompatiblePeerError,
    InvalidRequestError,
    PeerLostError,
    StalledError,
)
from tests.router.request.machine import world as w
from tests.router.request.machine.world import World

Build = Callable[[World], None]


def source(world: World) -> int:
    """Return the number of the open prefill stream."""
    (number,) = world.prefill
    return number


def pool(world: World) -> int:
    """Return the number of the open decode stream."""
    (number,) = world.decode
    return number


def wait_of(world: World, kind: type[object]) -> int:
    """Return the number of the search of this kind."""
    (number,) = (number for number, wait in world.waits.items() if isinstance(wait, kind))
    return number


def lose(world: World, number: int, error: BatonError | None = None) -> None:
    """End a stream with an error."""
    world.prefill.pop(number, None)
    world.decode.pop(number, None)
    world.on(ev.StreamEnded(number, error or PeerLostError("lost")))


def admitting(world: World) -> None:
    world.on(ev.Arrived())


def queued(world: World) -> None:
    admitting(world)
    world.place(wait_of(world, ev.Reserve))


def offered(world: World) -> None:
    queued(world)
    world.on(w.started(source(world)))


def reserved(world: World) -> None:
    offered(world)
    world.on(w.destination(pool(world)))


def computed(world: World) -> None:
    reserved(world)
    world.on(w.first_token(source(world)))


def computed_before_reservation(world: World) -> None:
    offered(world)
    world.on(w.first_token(source(world)))


def sent(world: World) -> None:
    computed(world)
    world.on(w.sent(source(world)))


def sent_before_first_token(world: World) -> None:
    reserved(world)
    world.on(w.sent(source(world)))


def decoding(world: World) -> None:
    sent(world)
    world.on(w.committed(pool(world), 1))


def refused(world: World) -> None:
    offered(world)
    lose(world, pool(world), CapacityError("full", resource="pages"))


def refused_when_computed(world: World) -> None:
    computed_before_reservation(world)
    lose(world, pool(world), CapacityError("full", resource="pages"))


def source_lost_in_queue(world: World) -> None:
    queued(world)
    lose(world, source(world))


def source_lost_before_reservation(world: World) -> None:
    offered(world)
    lose(world, source(world))


def source_lost(world: World) -> None:
    reserved(world)
    lose(world, source(world))


def source_lost_when_sent(world: World) -> None:
    sent(world)
    lose(world, source(world))


def both_lost(world: World) -> None:
    refused(world)
    lose(world, source(world))


def source_replaced(world: World) -> None:
    source_lost(world)
    world.on(ev.WorkerFound(_taken(world, ev.SearchPrefill), world.book("prefill")))


def source_replaced_before_reservation(world: World) -> None:
    source_lost_before_reservation(world)
    world.on(ev.WorkerFound(_taken(world, ev.SearchPrefill), world.book("prefill")))


def source_replaced_when_sent(world: World) -> None:
    source_lost_when_sent(world)
    world.on(ev.WorkerFound(_taken(world, ev.SearchPrefill), world.book("prefill")))
    world.on(w.started(source(world)))


def link_failed(world: World) -> None:
    computed(world)
    lose(world, source(world), HandoffError("no link"))


def link_failed_in_queue(world: World) -> None:
    queued(world)
    lose(world, source(world), HandoffError("no link"))


def link_failed_before_reservation(world: World) -> None:
    offered(world)
    lose(world, source(world), HandoffError("no link"))


def link_failed_during_search(world: World) -> None:
    refused(world)
    lose(world, source(world), HandoffError("no link"))


def queued_during_search(world: World) -> None:
    both_lost(world)
    world.on(ev.WorkerFound(_taken(world, ev.SearchPrefill), world.book("prefill")))


def asked(world: World) -> None:
    admitting(world)
    world.place(wait_of(world, ev.Reserve), num_cached=64, may_compute_rest=True)


def declined(world: World) -> None:
    asked(world)
    lose(world, pool(world), CapacityError("full", resource="pages"))


def decoding_alone(world: World) -> None:
    asked(world)
    world.on(w.local(pool(world)))


def committed_during_search(world: World) -> None:
    source_lost_when_sent(world)
    world.on(w.committed(pool(world), 1))


def migrating(world: World) -> None:
    decoding(world)
    lose(world, pool(world))


def moved(world: World) -> None:
    migrating(world)
    world.place(wait_of(world, ev.SearchPair))


def paused(world: World) -> None:
    decoding(world)
    world.on(ev.Preempted())


def resumed(world: World) -> None:
    """It has generated no token since it was preempted."""
    paused(world)
    world.place(wait_of(world, ev.SearchPair))
    world.on(w.started(source(world)))
    world.on(w.destination(pool(world)))
    world.on(w.first_token(source(world)))
    world.on(w.sent(source(world)))
    world.on(w.committed(pool(world), 1))


def _taken(world: World, kind: type[object]) -> int:
    number = wait_of(world, kind)
    del world.waits[number]
    return number


def _received(message: Callable[[int], ev.Received], of: Callable[[World], int]) -> Build:
    return lambda world: world.on(message(of(world)))


def _found(kind: type[object], role: str) -> Build:
    return lambda world: world.on(ev.WorkerFound(_taken(world, kind), world.book(role)))


def _failed(kind: type[object]) -> Build:
    return lambda world: world.on(ev.SearchFailed(_taken(world, kind)))


def _checked(*, is_fed: bool) -> Build:
    return lambda world: world.on(ev.LinkChecked(world.checks.pop().number, is_fed))


def _epoch(world: World) -> int:
    return world.decode[pool(world)].num_offers - 1


def _next(world: World) -> int:
    return len(world.tokens)


INVALID = InvalidRequestError(FieldViolation("prompt", "is bad"))
OTHER_TERMS = IncompatiblePeerError("other tokens")
FULL = CapacityError("full", resource="pages")
MESSAGES: Mapping[str, tuple[Callable[[World], int], Build]] = {
    "started": (source, _received(w.started, source)),
    "scored": (source, _received(w.scored, source)),
    "first_token": (source, _received(w.first_token, source)),
    "sent": (source, _received(w.sent, source)),
    "destination": (pool, lambda world: world.on(w.destination(pool(world), _epoch(world)))),
    "old_destination": (pool, lambda world: world.on(w.destination(pool(world), -1 % 2**32))),
    "committed": (pool, lambda world: world.on(w.committed(pool(world), _next(world)))),
    "local": (pool, lambda world: world.on(w.local(pool(world), _next(world)))),
    "tokens": (pool, lambda world: world.on(w.tokens(pool(world), _next(world), 2))),
    "finished": (pool, lambda world: world.on(w.finished(pool(world), _next(world)))),
    "tokens_lost": (pool, lambda world: world.on(w.tokens(pool(world), _next(world) + 1))),
}
EVENTS: Mapping[str, Build] = {
    **{name: event for name, (_, event) in MESSAGES.items()},
    "source_dead": lambda world: lose(world, source(world)),
    "source_ended": lambda world: world.on(ev.StreamEnded(source(world))),
    "source_drained": lambda world: lose(world, source(world), DrainingError("drains")),
    "source_refused": lambda world: lose(world, source(world), INVALID),
    "source_unlinked": lambda world: lose(world, source(world), HandoffError("no link")),
    "source_declined": lambda world: lose(world, source(world), OTHER_TERMS),
    "pool_dead": lambda world: lose(world, pool(world)),
    "pool_drained": lambda world: lose(world, pool(world), DrainingError("drains")),
    "pool_stalled": lambda world: lose(world, pool(world), StalledError("stalled")),
    "pool_full": lambda world: lose(world, pool(world), FULL),
    "pool_refused": lambda world: lose(world, pool(world), INVALID),
    "pool_declined": lambda world: lose(world, pool(world), OTHER_TERMS),
    "overdue": lambda world: world.on(ev.ReplyOverdue()),
    "found_source": _found(ev.SearchPrefill, "prefill"),
    "no_source": _failed(ev.SearchPrefill),
    "found_pool": _found(ev.SearchDecode, "decode"),
    "no_pool": _failed(ev.SearchDecode),
    "fed": _checked(is_fed=True),
    "unfed": _checked(is_fed=False),
    "preempted": lambda world: world.on(ev.Preempted()),
    "placed": lambda world: world.place(next(iter(world.waits))),
    "refused": lambda world: world.on(ev.NotAdmitted(FULL)),
    "no_pair": _failed(ev.SearchPair),
}

# The source fails before the pool has the prompt.
_FAILS = {
    state: {
        "source_dead": f"searching/{state}",
        "source_ended": f"searching/{state}",
        "source_drained": f"searching/{state}",
        "source_refused": "end:INVALID_REQUEST",
        "source_unlinked": f"link_failed/{state}",
        "source_declined": f"link_failed/{state}",
    }
    for state in ("booked", "offered", "searching", "reserved")
}
# The pool refuses before it holds memory.
_REFUSES = {
    state: {
        "pool_dead": f"{state}/searching",
        "pool_drained": f"{state}/searching",
        "pool_stalled": f"{state}/searching",
        "pool_full": f"{state}/searching",
        "pool_refused": "end:INVALID_REQUEST",
        "pool_declined": "link_failed/booked" if state.startswith("comput") else f"{state}/booked",
    }
    for state in ("queued", "computing", "computed", "searching", "link_failed")
}
# The pool is lost with the state.
_LOST = {
    "pool_dead": "migrating",
    "pool_drained": "migrating",
    "pool_stalled": "migrating",
    "pool_full": "end:OUT_OF_CAPACITY",
    "pool_refused": "end:INVALID_REQUEST",
    "pool_declined": "migrating",
}
_CHECKED = {
    state: {"fed": f"searching/{state}", "unfed": "migrating"}
    for state in ("booked", "offered", "searching", "reserved")
}
_SOUGHT = {"no_source": "end:PEER_LOST"}
_DECODES = {"tokens": "=", "finished": "end:LENGTH", "preempted": "migrating", **_LOST}
_ENDS_UNHEARD = {
    "source_dead": "=",
    "source_ended": "=",
    "source_drained": "=",
    "source_refused": "=",
    "source_unlinked": "=",
    "source_declined": "=",
}

EXPECTED: Mapping[Build, tuple[str, Mapping[str, str]]] = {
    admitting: ("admitting", {"placed": "queued/booked", "refused": "end:OUT_OF_CAPACITY"}),
    queued: ("queued/booked", {"started": "computing/offered", **_FAILS["booked"]}),
    offered: (
        "computing/offered",
        {
            "scored": "=",
            "first_token": "computed/offered",
            "destination": "computing/reserved",
            "overdue": "computing/searching",
            **_FAILS["offered"],
            **_REFUSES["computing"],
        },
    ),
    reserved: (
        "computing/reserved",
        {
            "scored": "=",
            "first_token": "computed/reserved",
            "sent": "=",
            **_FAILS["reserved"],
            **_LOST,
        },
    ),
    computed: (
        "computed/reserved",
        {
            "sent": "=",
            "committed": "released/decoding",
            **_FAILS["reserved"],
            **_LOST,
        },
    ),
    computed_before_reservation: (
        "computed/offered",
        {
            "destination": "computed/reserved",
            "overdue": "computed/searching",
            **_FAILS["offered"],
            **_REFUSES["computed"],
        },
    ),
    sent: (
        "computed/reserved",
        {
            "sent": "=",
            "committed": "released/decoding",
            "overdue": "migrating",
            **_FAILS["reserved"],
            **_LOST,
        },
    ),
    sent_before_first_token: (
        "computing/reserved",
        {
            "scored": "=",
            "first_token": "computed/reserved",
            "sent": "=",
            "overdue": "searching/reserved",
            **_FAILS["reserved"],
            **_LOST,
        },
    ),
    decoding: ("released/decoding", {"sent": "=", **_ENDS_UNHEARD, **_DECODES}),
    refused: (
        "computing/searching",
        {
            "scored": "=",
            "first_token": "computed/searching",
            "found_pool": "computing/offered",
            "no_pool": "end:OUT_OF_CAPACITY",
            **_FAILS["searching"],
        },
    ),
    refused_when_computed: (
        "computed/searching",
        {
            "found_pool": "computed/offered",
            "no_pool": "end:OUT_OF_CAPACITY",
            **_FAILS["searching"],
        },
    ),
    source_lost_in_queue: ("searching/booked", {"found_source": "queued/booked", **_SOUGHT}),
    source_lost_before_reservation: (
        "searching/offered",
        {
            "destination": "searching/reserved",
            "overdue": "searching/searching",
            "found_source": "queued/offered",
            **_SOUGHT,
            **_REFUSES["searching"],
        },
    ),
    source_lost: (
        "searching/reserved",
        {"found_source": "queued/reserved", **_SOUGHT, **_LOST},
    ),
    source_lost_when_sent: (
        "searching/reserved",
        {
            "committed": "closed/decoding",
            "found_source": "queued/reserved",
            **_SOUGHT,
            **_LOST,
        },
    ),
    both_lost: (
        "searching/searching",
        {
            "found_source": "queued/searching",
            "found_pool": "searching/booked",
            "no_pool": "end:OUT_OF_CAPACITY",
            **_SOUGHT,
        },
    ),
    source_replaced: (
        "queued/reserved",
        {"started": "computing/reserved", **_FAILS["reserved"], **_LOST},
    ),
    source_replaced_before_reservation: (
        "queued/offered",
        {
            "started": "computing/offered",
            "destination": "queued/reserved",
            "overdue": "queued/searching",
            **_FAILS["offered"],
            **_REFUSES["queued"],
        },
    ),
    source_replaced_when_sent: (
        "computing/reserved",
        {
            "scored": "=",
            "first_token": "computed/reserved",
            "destination": "=",
            "committed": "closed/decoding",
            "overdue": "migrating",
            **_FAILS["reserved"],
            **_LOST,
        },
    ),
    link_failed: (
        "link_failed/reserved",
        {
            "committed": "closed/decoding",
            **_CHECKED["reserved"],
            **_LOST,
        },
    ),
    link_failed_in_queue: ("link_failed/booked", _CHECKED["booked"]),
    link_failed_before_reservation: (
        "link_failed/offered",
        {
            "destination": "link_failed/reserved",
            "overdue": "link_failed/searching",
            **_CHECKED["offered"],
            **_REFUSES["link_failed"],
        },
    ),
    link_failed_during_search: (
        "link_failed/searching",
        {
            "found_pool": "link_failed/booked",
            "no_pool": "end:OUT_OF_CAPACITY",
            **_CHECKED["searching"],
        },
    ),
    queued_during_search: (
        "queued/searching",
        {
            "started": "computing/searching",
            "found_pool": "queued/booked",
            "no_pool": "end:OUT_OF_CAPACITY",
            **_FAILS["searching"],
        },
    ),
    asked: (
        "booked/asked",
        {
            "local": "closed/decoding",
            "overdue": "queued/booked",
            "pool_dead": "queued/booked",
            "pool_drained": "queued/booked",
            "pool_stalled": "queued/booked",
            "pool_full": "queued/booked",
            "pool_refused": "end:INVALID_REQUEST",
            "pool_declined": "queued/booked",
        },
    ),
    declined: ("queued/booked", {"started": "computing/offered", **_FAILS["booked"]}),
    decoding_alone: ("closed/decoding", {**_DECODES, "preempted": "="}),  # no token yet
    committed_during_search: ("closed/decoding", _DECODES),
    migrating: ("migrating", {"placed": "queued/booked", "no_pair": "end:PEER_LOST"}),
    moved: ("queued/booked", {"started": "computing/offered", **_FAILS["booked"]}),
    paused: ("migrating", {"placed": "queued/booked", "no_pair": "end:PEER_LOST"}),
    resumed: ("released/decoding", {"sent": "=", **_ENDS_UNHEARD, **_DECODES, "preempted": "="}),
}
