"""The router's page in a real browser, and the other paths of its metrics port."""

import asyncio
import html
import http.client
import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2

from protos import generation_pb2 as pb
from router.api.status_page import status_pages
from runtime.observe.exposition import Exposition, new_registry
from runtime.version import VERSION

HOSTILE = '<img src=x onerror="document.title=1"><b>down</b>'
CHROMIUM = shutil.which("chromium")
BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def status_of(num_tokens: int = 0) -> pb.GetClusterStatusResponse:
    worker = pb.WorkerStatus(
        role="decode",
        address="10.0.0.7:7000",
        serving=True,
        incarnation="a",
        stages=["0-4", "4-8"],
        pages_total=512,
        pages_free=500,
        running_requests=3,
        output_tokens=num_tokens,
    )
    down = pb.WorkerStatus(role="prefill", address="10.0.0.8:7000", reason=HOSTILE, incarnation="b")
    return pb.GetClusterStatusResponse(
        model="a model",
        running_requests=3,
        waiting_requests=2,
        workers=[worker, down],
        placements=[pb.PlacementCount(kind="aggregated", why="load", requests=9)],
    )


@contextmanager
def served(problem: str = "") -> Iterator[str]:
    """Serve the pages of a router that generates all the time; yield their address."""
    began_s = time.monotonic()
    pages = status_pages(
        lambda: status_of(round(1000 * (time.monotonic() - began_s))), lambda: problem
    )
    exposition = Exposition.start(new_registry(role="router", version=VERSION), port=0, pages=pages)
    try:
        yield f"http://127.0.0.1:{exposition.port}"
    finally:
        exposition.close()


async def get(url: str) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=30, trust_env=False) as client:
        return await client.get(url)


async def test_a_browser_shows_the_state_of_the_cluster(tmp_path: Path) -> None:
    """Texts of workers are shown as text: a reason with markup runs nothing."""
    assert CHROMIUM is not None, "chromium is not installed (Debian: apt install chromium)"
    with served() as url:
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *BROWSER_FLAGS,
            f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=4000",
            "--dump-dom",
            f"{url}/",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await asyncio.wait_for(browser.communicate(), 60)
    page = output.decode()
    assert "<title>Baton · a model</title>" in page
    shown = html.unescape(
        re.sub(r"<[^>]*>", " ", page[page.index("<body>") : page.index("<script>")])
    )
    text = " ".join(shown.split())
    for part in (
        "a model live",
        f"version {VERSION}",
        "running requests 3",
        "waiting at the router 2",
        "decode 10.0.0.7:7000 0-4 │ 4-8 serving 3 0",
        "12 of 512",
        f"prefill 10.0.0.8:7000 {HOSTILE}",
        "placed: 9 aggregated (load)",
    ):
        assert part in text, text
    assert "<b>down</b>" not in page
    rate = re.search(r"generated tokens/s (\d+)", text)
    assert rate is not None, text
    assert int(rate[1]) > 0


async def test_paths_that_load_generators_and_probes_expect() -> None:
    with served() as url:
        health, version = await get(f"{url}/health"), await get(f"{url}/version")
        assert (health.status_code, health.text) == (200, "OK\n")
        assert version.json() == {"version": VERSION}
        status = json.loads((await get(f"{url}/status.json")).text)
        assert [worker["role"] for worker in status["workers"]] == ["decode", "prefill"]
        assert status["workers"][1]["runningRequests"] == 0, "zeros are present"
        assert "process_cpu_seconds_total" in (await get(f"{url}/metrics")).text
        page = await get(f"{url}/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        async with httpx2.AsyncClient(timeout=30, trust_env=False) as client:
            assert (await client.post(f"{url}/")).status_code == 405
            head = await client.head(f"{url}/")
            assert (head.status_code, head.text) == (200, "")
    with served("no decode worker serves") as url:
        health = await get(f"{url}/health")
        assert (health.status_code, health.text) == (503, "no decode worker serves\n")


async def test_a_router_whose_loop_stands_still_is_reported() -> None:
    """The page has a deadline of its own, and does not wait for the loop."""
    with served() as url, ThreadPoolExecutor() as executor:
        asking = executor.submit(_get, f"{url}/status.json")
        assert asking.result() == 503, "the loop stands still while this waits"
        assert (await get(f"{url}/status.json")).status_code == 200


def _get(url: str) -> int:
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("GET", f"/{path}")
    return connection.getresponse().status
