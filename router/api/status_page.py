"""The router's state for browsers and load generators, next to /metrics.

/               a page that refreshes itself
/status.json    GetClusterStatus in protobuf's JSON, which writes 64-bit integers as text
/health         200 while requests could be served, else 503 and the reason
/version        the version as JSON
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from importlib import resources

from google.protobuf.json_format import MessageToJson

from protos import generation_pb2
from runtime.observe.exposition import Page, PageBody
from runtime.version import VERSION

READ_S = 2.0  # limit of one reading by a thread of the exposition
_JSON = "application/json"


def status_pages(
    read: Callable[[], generation_pb2.GetClusterStatusResponse], problem: Callable[[], str]
) -> Mapping[str, Page]:
    """Return the pages by path. Call it in the router's loop, where both functions will run.

    `problem` returns why no request could be served, or "".
    """
    loop = asyncio.get_running_loop()
    html = resources.files("router.api").joinpath("status.html").read_bytes()

    def in_loop(page: Callable[[], PageBody]) -> PageBody:
        async def run() -> PageBody:
            return page()

        try:
            return asyncio.run_coroutine_threadsafe(run(), loop).result(READ_S)
        except (TimeoutError, RuntimeError):
            return PageBody("text/plain", b"the router is busy or stops\n", status=503)

    def status() -> PageBody:
        text = MessageToJson(read(), always_print_fields_with_no_presence=True, indent=None)
        return PageBody(_JSON, text.encode())

    def health() -> PageBody:
        reason = problem()
        text = f"{reason}\n" if reason else "OK\n"
        return PageBody("text/plain", text.encode(), status=503 if reason else 200)

    return {
        "/": lambda: PageBody("text/html; charset=utf-8", html),
        "/status.json": lambda: in_loop(status),
        "/health": lambda: in_loop(health),
        "/version": lambda: PageBody(_JSON, json.dumps({"version": VERSION}).encode()),
    }
