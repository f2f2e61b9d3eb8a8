"""The request log: one line for each choice of each request, whatever its end."""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import generation_pb2
from router.request import request_log as module
from router.request.request_log import RequestLog, RequestRecord, client_of
from router.request.timeline import STAGES
from runtime.errors import ConfigError, DrainingError, InvalidRequestError
from runtime.security.access import Caller, ServerSecurity
from runtime.security.tokens import TokenList
from tests.router.harness import RouterHarness, eventually, running_router, token_request
from tests.router.request.test_migration import cluster, gives_up_at_token
from tests.support.router.fake_workers import FakeWorker, Point

PROMPT = [1, 2, 3]
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@contextmanager
def opened(path: Path) -> Iterator[RequestLog]:
    log = RequestLog(path)
    try:
        yield log
    finally:
        log.close()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(request_id: str) -> RequestRecord:
    return RequestRecord(
        time="2026-11-27T00:00:00.000000Z",
        request_id=request_id,
        choice=0,
        client="",
        outcome="stop",
    )


async def logged(
    path: Path, *workers: FakeWorker, use: Callable[[RouterHarness], Awaitable[object]]
) -> list[dict[str, Any]]:
    """Let `use` send requests to a router with a log, and return its lines."""
    with opened(path) as log:
        async with running_router(*workers, request_log=log) as router:
            await use(router)
            await eventually(lambda: router.service.num_active == 0, "the requests have ended")
    return lines_of(path)


async def test_a_line_says_what_the_client_was_told(tmp_path: Path) -> None:
    prefill, (decode,) = cluster(1)
    finishes: list[generation_pb2.GenerateFinish] = []

    async def use(router: RouterHarness) -> None:
        request = token_request(PROMPT, max_tokens=3, n=2, request_id="r", priority=-1)
        parent = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
        call = router.stub.Generate(request, timeout=60, metadata=(("traceparent", parent),))
        async for response in call:
            if response.HasField("finish"):
                finishes.append(response.finish)

    lines = await logged(tmp_path / "log", prefill, decode, use=use)
    assert [(line["request_id"], line["choice"], line["outcome"]) for line in lines] == [
        ("r", 0, "length"),
        ("r", 1, "length"),
    ]
    told = [
        {
            name: pytest.approx(getattr(finish.timings, name), abs=1e-6)
            for name in (*STAGES.values(), "total_s")
            if finish.timings.HasField(name)
        }
        for finish in finishes
    ]
    for line in lines:
        assert (line["priority"], line["trace_id"]) == (-1, TRACE_ID)
        assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 3)
        assert (line["prefill"], line["decode"]) == (prefill.address, decode.address)
        assert 0 < line["timings"].pop("ttft_s") <= line["timings"]["total_s"]
        assert line["timings"] in told
        assert not {"error", "retries", "migrations"} & line.keys()


async def test_a_migration_and_its_new_pool_are_in_the_line(tmp_path: Path) -> None:
    prefill, pools = cluster(2)
    give_up = gives_up_at_token(2, DrainingError("it drains"))
    for pool in pools:
        pool.at(Point.TOKEN, give_up)
    (line,) = await logged(
        tmp_path / "log",
        prefill,
        *pools,
        use=lambda router: router.ask(token_request(PROMPT, max_tokens=6)),
    )
    assert (line["outcome"], line["completion_tokens"]) == ("length", 6)
    assert (line["migrations"], line["retries"]) == (1, 1)
    assert line["decode"] in {pool.address for pool in pools}


async def test_requests_that_fail_have_their_reason(tmp_path: Path) -> None:
    """A refused one, one whose client leaves, and one that no pool can finish."""
    prefill, (decode,) = cluster(1)

    async def use(router: RouterHarness) -> None:
        with pytest.raises(InvalidRequestError):
            await router.ask(token_request([10**6], request_id="refused"))
        decode.token_pause_s = 0.05
        call = router.stub.Generate(token_request(PROMPT, max_tokens=200, request_id="left"))
        await call.read()
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call.read()
        await eventually(lambda: router.service.num_active == 0, "the client's request is gone")
        with pytest.raises(InvalidRequestError):
            await router.ask(token_request(PROMPT, request_id="refused", model="other"))

    lines = await logged(tmp_path / "log", prefill, decode, use=use)
    assert [(line["request_id"], line["outcome"], line.get("error")) for line in lines] == [
        ("refused", "refused", "INVALID_REQUEST"),
        ("left", "cancelled", None),
        ("refused", "refused", "UNKNOWN_MODEL"),
    ]
    assert lines[1]["completion_tokens"] >= 1
    assert "prompt_tokens" not in lines[0]


@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        (Caller(identity="x", names=frozenset({"bob", "alice"}), address="7f000001"), "alice"),
        (Caller(address="c0000207"), "192.0.2.7"),
        (Caller(address="20010db800000001"), "2001:db8:0:1::/64"),
        (Caller(address="unix:/run/socket"), "unix:/run/socket"),
        (Caller(), ""),
    ],
)
def test_a_client_is_named_as_people_know_it(caller: Caller, expected: str) -> None:
    assert client_of(caller) == expected


def test_the_file_is_opened_again_after_it_was_moved(tmp_path: Path) -> None:
    path, moved = tmp_path / "log", tmp_path / "log.1"
    for rename in (True, False):
        with opened(path) as log:
            log.write(record("before"))
        with opened(path) as log:
            if rename:
                path.rename(moved)
            else:
                path.unlink()
            log.write(record("after"))
        assert [line["request_id"] for line in lines_of(path)] == ["after"]
    assert [line["request_id"] for line in lines_of(moved)] == ["before"]


async def test_a_tenant_that_a_gateway_names_is_the_client(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("gate 0123456789abcdef\n")
    security = ServerSecurity(
        tokens=TokenList(tmp_path / "tokens"), tenant_sources=frozenset({"gate"})
    )
    prefill, (decode,) = cluster(1)
    with opened(tmp_path / "log") as log:
        async with running_router(prefill, decode, request_log=log, security=security) as router:

            async def ask(**metadata: str) -> None:
                shown = (("authorization", "Bearer 0123456789abcdef"), *metadata.items())
                request = token_request(PROMPT)
                async for _ in router.stub.Generate(request, metadata=shown):
                    pass

            await ask(**{"baton-tenant": "acme"})
            await ask()
            with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
                await ask(**{"baton-tenant": "?"})
    assert [line["client"] for line in lines_of(tmp_path / "log")] == ["acme", "gate"]


def test_a_full_disk_loses_records_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), opened(Path("/dev/full")) as log:
        for number in range(3):
            log.write(record(str(number)))
    assert [entry.message for entry in caplog.records] == [
        "request log: 1 records were not written"
    ]


def test_a_stalled_disk_delays_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 4)
    goes_on = threading.Event()
    monkeypatch.setattr(RequestLog, "_append", lambda *_: goes_on.wait(60))
    with opened(tmp_path / "log") as log:
        for number in range(100):
            log.write(record(str(number)))
        goes_on.set()


@pytest.mark.parametrize("path", ["nowhere/log", "."])
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        RequestLog(tmp_path / path)
