"""A real OTLP collector receives the spans of one request: one connected trace, from the client's
span on."""

import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from baton.values import Query, Stop
from runtime.errors import ConfigError
from runtime.observe import otel, tracing
from runtime.observe.tracing import UNTRACED, begin, note, outgoing
from runtime.observe.tracing_setup import open_tracing
from tests.support.cluster.one_process import cluster_in_process

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
# Every span of a request, and the one it is part of.
TREE = {
    "baton.v1.Generation/Generate": PARENT,
    "baton.router.admit": "baton.v1.Generation/Generate",
    "baton.v1.Prefill/Run": "baton.v1.Generation/Generate",
    "baton.prefill.queue": "baton.v1.Prefill/Run",
    "baton.prefill.compute": "baton.v1.Prefill/Run",
    "baton.transfer.send": "baton.v1.Prefill/Run",
    "baton.transfer.chunk": "baton.transfer.send",
    "baton.v1.Decode/Generate": "baton.v1.Generation/Generate",
    "baton.transfer.receive": "baton.v1.Decode/Generate",
    "baton.decode.generate": "baton.v1.Decode/Generate",
}


class Collector(otlp_grpc.TraceServiceServicer):
    """A collector that keeps spans with the name of the sending service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    async def Export(
        self, request: otlp.ExportTraceServiceRequest, context: object
    ) -> otlp.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            (service,) = [
                a.value.string_value
                for a in resource.resource.attributes
                if a.key == "service.name"
            ]
            self.spans += [
                (service, span) for scope in resource.scope_spans for span in scope.spans
            ]
        return otlp.ExportTraceServiceResponse()


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server, made = grpc.aio.server(), Collector()
    otlp_grpc.add_TraceServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield made, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


def attributes(span: Any) -> dict[str, str]:  # noqa: ANN401 - a message of untyped stubs
    return {item.key: item.value.string_value for item in span.attributes}


async def test_one_request_is_one_trace_over_all_roles(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel, "EXPORT_S", 60)  # the collector is there, and may be busy
    async with (
        collector() as (heard, endpoint),
        cluster_in_process(
            checkpoint, decode_pp=2, otel_endpoint=endpoint, router={"otel_endpoint": endpoint}
        ) as client,
    ):
        query = Query((5, 6, 7), stop=Stop(max_tokens=4, ignore_eos=True), request_id="traced")
        async for _ in client.generate(query, traceparent=TRACEPARENT):
            pass
    mine = [(service, span) for service, span in heard.spans if span.trace_id.hex() == TRACE]
    names = {span.span_id.hex(): span.name for _, span in mine}
    tree = {
        span.name: names.get(span.parent_span_id.hex(), span.parent_span_id.hex())
        for _, span in mine
    }
    assert tree == TREE
    assert len(mine) == len(TREE), "each once"
    assert {service for service, _ in mine} == {"baton-router", "baton-prefill", "baton-decode"}
    assert {attributes(span)["request_id"] for _, span in mine} == {"traced"}
    (admission,) = (span for _, span in mine if span.name == "baton.router.admit")
    assert attributes(admission)["placement"] == "disaggregated"
    calls = [span for _, span in mine if "/" in span.name]
    assert len({attributes(span)["worker"] for span in calls}) == 3
    assert {attributes(span)["grpc_code"] for span in calls} == {"OK"}
    bounds = {span.name: (span.start_time_unix_nano, span.end_time_unix_nano) for _, span in mine}
    for name, parent in TREE.items():
        assert parent == PARENT or bounds[parent][0] <= bounds[name][0] <= bounds[name][1]


def test_the_page_for_users_lists_the_spans() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text()
    assert re.findall(r"^\| `([\w./]+)` \|", page, re.MULTILINE) == list(TREE)


def test_without_tracing_the_callers_context_still_travels() -> None:
    context = (("traceparent", TRACEPARENT),)
    with UNTRACED.call(
        "/a/b", tracing.context_of((("x", "y"), *context, ("tracestate", b"bytes")))
    ):
        note(request_id="r")
        begin("part").end()
        assert outgoing() == context
    assert outgoing() == ()


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://x"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="http://127"):
        open_tracing(endpoint, role="router", worker="w")


def test_a_missing_package_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "runtime.observe.otel", None)
    with pytest.raises(ConfigError, match=r"pip install 'baton\[otel\]'"):
        open_tracing("http://127.0.0.1:4317", role="router", worker="w")
