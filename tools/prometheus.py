"""A temporary Prometheus server on loopback, with targets that may change.

It is queried over its HTTP API. Production rules use minutes, in `for` and in ranges. `scaled`
returns the same rules for a run of seconds: every duration is divided by one factor, and nothing
else changes.
"""

import asyncio
import json
import re
import shutil
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testing.past_proxies import local_page

LOCAL = "127.0.0.1"
_SECONDS = {"s": 1, "m": 60, "h": 3600}
Series = list[dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """One /metrics endpoint, with the labels of a scrape in Kubernetes."""

    job: str
    port: int
    namespace: str


def scaled(rules: str, factor: float) -> dict[str, Any]:
    """Return the groups of a rule file with every duration divided by `factor`."""
    loaded: dict[str, Any] = yaml.safe_load(rules)
    for rule in (rule for group in loaded["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(
            r"\[(\d+[smh])\]", lambda found: f"[{_shorter(found[1], factor)}]", rule["expr"]
        )
        if "for" in rule:
            rule["for"] = _shorter(rule["for"], factor)
    return loaded


def _shorter(duration: str, factor: float) -> str:
    return f"{round(int(duration[:-1]) * _SECONDS[duration[-1]] * 1000 / factor)}ms"


class Prometheus:
    """A running server."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self.address = f"{LOCAL}:{port}"

    def watch(self, targets: list[Target]) -> None:
        """Replace the scraped targets. The server detects the change by itself."""
        groups = [
            {
                "targets": [f"{LOCAL}:{target.port}"],
                "labels": {"job": target.job, "namespace": target.namespace},
            }
            for target in targets
        ]
        new = self._folder / "targets.new"
        new.write_text(json.dumps(groups))
        new.rename(self._folder / "targets.json")

    async def query(self, expression: str) -> Series:
        """Evaluate an expression now. Raises OSError while the server starts."""
        return await self._get("query", {"query": expression})

    async def query_range(
        self, expression: str, start_s: float, end_s: float, step_s: float
    ) -> Series:
        """Evaluate an expression between two times, in seconds since the epoch."""
        return await self._get(
            "query_range",
            {
                "query": expression,
                "start": f"{start_s:.3f}",
                "end": f"{end_s:.3f}",
                "step": f"{step_s:g}",
            },
        )

    async def until(
        self, expression: str, holds: Callable[[Series], bool], timeout_s: float
    ) -> Series:
        """Return the first result for which `holds` is true. Raises AssertionError with the last one."""
        answer: Series | str = "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        answer = await self.query(expression)
                    except OSError as error:  # the server is still starting
                        answer = str(error)
                    if not isinstance(answer, str) and holds(answer):
                        return answer
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"{expression}: not within {timeout_s} s, last {answer}") from None

    async def _get(self, what: str, parameters: Mapping[str, str]) -> Series:
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        reply = await asyncio.to_thread(lambda: json.loads(local_page(url, timeout_s=30)))
        result: Series = reply["data"]["result"]
        return result


@asynccontextmanager
async def prometheus(
    folder: Path, rules: Mapping[str, Any], *, port: int, interval_s: float
) -> AsyncIterator[Prometheus]:
    """Run a server that scrapes and evaluates at this interval, and stop it after the block.

    Raises FileNotFoundError if Prometheus is not installed.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise FileNotFoundError("prometheus is not installed (Debian: apt install prometheus)")
    interval = f"{round(interval_s * 1000)}ms"
    (folder / "rules.yaml").write_text(yaml.safe_dump(dict(rules)))
    (folder / "prometheus.yaml").write_text(
        yaml.safe_dump(
            {
                "global": {
                    "scrape_interval": interval,
                    "scrape_timeout": interval,
                    "evaluation_interval": interval,
                },
                "rule_files": ["rules.yaml"],
                "scrape_configs": [
                    {"job_name": "baton", "file_sd_configs": [{"files": ["targets.json"]}]}
                ],
            }
        )
    )
    with (folder / "prometheus.out").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={LOCAL}:{port}",
            "--log.level=warn",
            stdout=output,
            stderr=output,
        )
    try:
        yield Prometheus(folder, port)
    finally:
        process.kill()
        await process.wait()
