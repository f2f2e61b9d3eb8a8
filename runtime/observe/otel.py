"""OpenTelemetry implementation of `runtime.observe.tracing`. Needs the extra `otel`.

Only `runtime.observe.tracing_setup` imports this module. The SDK's own variables apply, such as
OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from runtime.observe.tracing import Metadata, Span, current
from runtime.version import VERSION

EXPORT_S = 2  # also limits the end of the process if the collector is gone
_PROPAGATOR = TraceContextTextMapPropagator()


class OtelSpan:
    """OpenTelemetry implementation of `runtime.observe.tracing.Span`."""

    def __init__(self, tracer: Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    def note(self, **attributes: str | int | float) -> None:
        self._span.set_attributes(attributes)

    def child(self, name: str, **attributes: str | int | float) -> Span:
        return OtelSpan(
            self._tracer,
            self._tracer.start_span(
                name, context=trace.set_span_in_context(self._span), attributes=attributes
            ),
        )

    def record(
        self, name: str, began_s: float, ended_s: float, **attributes: str | int | float
    ) -> None:
        since_epoch_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(self._span),
            attributes=attributes,
            start_time=since_epoch_ns + int(began_s * 1e9),
        )
        span.end(since_epoch_ns + int(ended_s * 1e9))

    def fail(self, why: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, why))

    def outgoing(self) -> Metadata:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return tuple(carrier.items())

    def end(self) -> None:
        if self._span.is_recording():  # otherwise it has already ended
            self._span.end()


class OtelTracing:
    """OpenTelemetry implementation of `runtime.observe.tracing.Tracing`.

    Every span names the worker, which identifies the process and its incarnation.
    """

    def __init__(self, provider: TracerProvider, worker: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("baton", VERSION)
        self._worker = worker

    @classmethod
    def to_collector(cls, endpoint: str, *, role: str, worker: str) -> Self:
        """Create a tracing that sends spans in batches, from its own thread."""
        resource = Resource.create(
            {
                "service.name": f"baton-{role}",
                "service.instance.id": worker,
                "service.version": VERSION,
            }
        )
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S))
        )
        return cls(provider, worker)

    @contextmanager
    def call(self, method: str, metadata: Metadata) -> Iterator[Span]:
        parent = _PROPAGATOR.extract(dict(metadata))
        span = self._tracer.start_span(
            method.removeprefix("/"),
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"worker": self._worker, "rpc.system": "grpc"},
        )
        made = OtelSpan(self._tracer, span)
        try:
            with current(made):
                yield made
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            made.end()

    def close(self) -> None:
        self._provider.shutdown()
