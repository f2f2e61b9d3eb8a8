"""Traces: spans that follow a request over processes, in W3C trace context. Off unless an endpoint
is configured.

    with tracing.call("/baton.v1.Prefill/Run", metadata):        # around every call, and every request on a shared one
        note(request_id="r1")                                    # anything below, in this task or those it starts
        span = begin("baton.transfer.send"); ...; span.end()     # a child of the call's span
        stub.Generate(..., metadata=outgoing())                  # the next process goes on with the trace

Without an endpoint nothing is recorded, and the context a client brings still travels to the
workers.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol

Metadata = tuple[tuple[str, str], ...]
CONTEXT_KEYS = ("traceparent", "tracestate")


class Span(Protocol):
    """A part of a request's life. Ends once; ending again changes nothing."""

    def note(self, **attributes: str | int | float) -> None: ...

    def child(self, name: str, **attributes: str | int | float) -> "Span": ...

    def record(
        self, name: str, began_s: float, ended_s: float, **attributes: str | int | float
    ) -> None:
        """A child that is over already; seconds of the monotonic clock."""
        ...

    def fail(self, why: str) -> None:
        """It ends with an error."""
        ...

    def outgoing(self) -> Metadata:
        """What a call must carry for its server to go on with this trace."""
        ...

    def end(self) -> None: ...


class Tracing(Protocol):
    """One per process."""

    def call(self, method: str, metadata: Metadata) -> AbstractContextManager[Span]:
        """A span around one incoming call; it is the current one inside the block."""
        ...

    def close(self) -> None:
        """Send what is recorded. Blocks for as long as the exporter's limits allow."""
        ...


class NoopSpan:
    """A span without a recorder: records nothing, and hands on the context that came in."""

    def __init__(self, context: Metadata = ()) -> None:
        self._context = context

    def note(self, **attributes: str | int | float) -> None:
        """Nothing is recorded."""

    def child(self, name: str, **attributes: str | int | float) -> Span:
        return self

    def record(
        self, name: str, began_s: float, ended_s: float, **attributes: str | int | float
    ) -> None:
        """Nothing is recorded."""

    def fail(self, why: str) -> None:
        """Nothing is recorded."""

    def outgoing(self) -> Metadata:
        return self._context

    def end(self) -> None:
        """There is nothing to end."""


_NOBODY = NoopSpan()
_current: ContextVar[Span] = ContextVar("span", default=_NOBODY)


class NoTracing:
    """Satisfies `Tracing`."""

    def call(self, method: str, metadata: Metadata) -> AbstractContextManager[Span]:
        return current(NoopSpan(metadata))

    def close(self) -> None:
        """There is nothing to send."""


UNTRACED = NoTracing()


@contextmanager
def current(span: Span) -> Iterator[Span]:
    """Make it the one that `note`, `begin` and `outgoing` mean, in this task and those it
    starts."""
    token = _current.set(span)
    try:
        yield span
    finally:
        _current.reset(token)


def context_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """The trace context among a call's metadata."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if key in CONTEXT_KEYS and isinstance(value, str)
    )


def note(**attributes: str | int | float) -> None:
    _current.get().note(**attributes)


def begin(name: str, **attributes: str | int | float) -> Span:
    """A child of the current span; the caller ends it."""
    return _current.get().child(name, **attributes)


def outgoing() -> Metadata:
    return _current.get().outgoing()
