"""Traces: spans that follow a request across processes, in W3C trace context.

Tracing is off unless an endpoint is configured.

    with tracing.call("/baton.v1.Prefill/Run", metadata):        # around every call, and every request on a shared one
        note(request_id="r1")                                    # anything below, in this task or those it starts
        span = begin("baton.transfer.send"); ...; span.end()     # a child of the call's span
        stub.Generate(..., metadata=outgoing())                  # the next process continues the trace

Without an endpoint no span is recorded, but a client's trace context is still passed to the
workers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol

Metadata = tuple[tuple[str, str], ...]
CONTEXT_KEYS = ("traceparent", "tracestate")
# W3C Trace Context, section 3.2: version, trace id, parent id, flags.
_PARENT = re.compile(
    r"[0-9a-f]{2}-(?P<trace_id>[0-9a-f]{32})-(?P<span_id>[0-9a-f]{16})-[0-9a-f]{2}(-.*)?"
)


class Span(Protocol):
    """A part of a request's life. Ends once; a second end has no effect."""

    def note(self, **attributes: str | int | float) -> None: ...

    def child(self, name: str, **attributes: str | int | float) -> "Span": ...

    def record(
        self, name: str, began_s: float, ended_s: float, **attributes: str | int | float
    ) -> None:
        """Record a child span that is already over; seconds of the monotonic clock."""
        ...

    def fail(self, why: str) -> None:
        """Mark the span as failed."""
        ...

    def outgoing(self) -> Metadata:
        """Return the metadata with which a call continues this trace."""
        ...

    def end(self) -> None: ...


class Tracing(Protocol):
    """Tracing of one process."""

    def call(self, method: str, metadata: Metadata) -> AbstractContextManager[Span]:
        """Return a span around one incoming call, which is current inside the block."""
        ...

    def close(self) -> None:
        """Send all recorded spans. Blocks at most as long as the exporter's limits allow."""
        ...


class NoopSpan:
    """Span that records nothing and passes on the incoming context."""

    def __init__(self, context: Metadata = ()) -> None:
        self._context = context

    def note(self, **attributes: str | int | float) -> None:
        """Do nothing."""

    def child(self, name: str, **attributes: str | int | float) -> Span:
        return self

    def record(
        self, name: str, began_s: float, ended_s: float, **attributes: str | int | float
    ) -> None:
        """Do nothing."""

    def fail(self, why: str) -> None:
        """Do nothing."""

    def outgoing(self) -> Metadata:
        return self._context

    def end(self) -> None:
        """Do nothing."""


_NOBODY = NoopSpan()
_current: ContextVar[Span] = ContextVar("span", default=_NOBODY)


class NoTracing:
    """Tracing that records nothing."""

    def call(self, method: str, metadata: Metadata) -> AbstractContextManager[Span]:
        return current(NoopSpan(metadata))

    def close(self) -> None:
        """Do nothing."""


UNTRACED = NoTracing()


@contextmanager
def current(span: Span) -> Iterator[Span]:
    """Make `span` current for `note`, `begin` and `outgoing`, in this task and those it starts."""
    token = _current.set(span)
    try:
        yield span
    finally:
        _current.reset(token)


def context_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Return the trace context in a call's metadata."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if key in CONTEXT_KEYS and isinstance(value, str)
    )


def note(**attributes: str | int | float) -> None:
    _current.get().note(**attributes)


def begin(name: str, **attributes: str | int | float) -> Span:
    """Begin a child of the current span; the caller ends it."""
    return _current.get().child(name, **attributes)


def outgoing() -> Metadata:
    return _current.get().outgoing()


def trace_ids() -> Mapping[str, str]:
    """Return `trace_id` and `span_id` of the current span, in hexadecimal.

    Without an endpoint they are the client's; empty if it sent none, or none that is valid.
    """
    found = _PARENT.fullmatch(dict(outgoing()).get("traceparent", ""))
    return found.groupdict() if found else {}
