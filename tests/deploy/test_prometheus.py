"""A real Prometheus with the project's rules watches a real cluster: rules give series, an alert fires and clears."""

import asyncio
import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import DEPLOY
from tests.support.checkpoints import make_checkpoint
from tests.support.clusters import RunningCluster, running_cluster
from tests.support.questions import as_query, make_questions

LOCAL = "127.0.0.1"
# Series that need what this cluster does not have: a draft.
WITHOUT_DRAFT = {"instance:baton_spec_accepted:ratio_10m"}
Series = list[dict[str, Any]]


class Prometheus:
    """A running server's query API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://{LOCAL}:{port}/api/v1/query?"

    async def query(self, expression: str) -> Series:
        url = self._url + urllib.parse.urlencode({"query": expression})
        reply = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(url, timeout=5)))
        result: Series = reply["data"]["result"]
        return result

    async def until(self, expression: str, holds: Callable[[Series], bool], timeout_s: float) -> Series:
        """The first answer for which `holds` is true."""
        answer: Series | str = "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        answer = await self.query(expression)
                    except OSError as error:  # it is still starting
                        answer = str(error)
                    if not isinstance(answer, str) and holds(answer):
                        return answer
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"{expression}: not within {timeout_s} s, last {answer}") from None


def _write_configuration(folder: Path, targets: dict[str, int]) -> Path:
    """Everything once a second, and alerts without their patience."""
    rules = yaml.safe_load((DEPLOY / "alerts" / "rules.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    jobs = [{"job_name": name, "static_configs": [{"targets": [f"{LOCAL}:{port}"]}]} for name, port in targets.items()]
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                                    "rule_files": ["rules.yaml"], "scrape_configs": jobs}))
    return path


@asynccontextmanager
async def prometheus(folder: Path, targets: dict[str, int], port: int) -> AsyncIterator[Prometheus]:
    program = shutil.which("prometheus")
    assert program is not None, "prometheus is needed to test the rules: install it (Debian: prometheus)"
    with (folder / "prometheus.out").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            program, f"--config.file={_write_configuration(folder, targets)}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={LOCAL}:{port}", "--log.level=warn", stdout=output, stderr=output)
    try:
        yield Prometheus(port)
    finally:
        process.kill()
        await process.wait()


async def _ask(running: RunningCluster, count: int) -> None:
    questions = make_questions(count, seed=5, max_prompt=40, max_tokens=6)
    await asyncio.gather(*(running.client.complete(as_query(question), timeout_s=60) for question in questions))


async def test_rules_give_series_and_alerts_fire_and_clear(tmp_path: Path, unused_tcp_port: int) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3_5_text")
    async with running_cluster(checkpoint, decode_pp=2) as running:
        targets = {name: await running.metrics_port(name) for name in running.cluster.processes}
        async with prometheus(tmp_path, targets, unused_tcp_port) as server:
            await server.until("baton_build_info", lambda series: len(series) == len(targets), timeout_s=30)
            await _ask(running, 1)  # a labelled counter's first sample is no increase yet
            await server.until("baton_e2e_seconds_count", bool, timeout_s=20)
            await _ask(running, 4)
            rules = yaml.safe_load((tmp_path / "rules.yaml").read_text())["groups"][0]["rules"]
            for name in {rule["record"] for rule in rules} - WITHOUT_DRAFT:
                await server.until(name, bool, timeout_s=20)
            assert await server.query('ALERTS{severity=~"warning|critical"}') == [], "a healthy cluster is quiet"
            running.cluster.processes["decode-0.0"].kill()
            (alert,) = await server.until('ALERTS{alertname="BatonRoleDown"}', bool, timeout_s=20)
            assert alert["metric"]["role"] == "decode"
            assert alert["metric"]["alertstate"] == "firing"
            await server.until('ALERTS{alertname="BatonProcessDown", job="decode-0.0"}', bool, timeout_s=20)
            await running.cluster.wait_serving(timeout_s=60)
            await server.until('ALERTS{alertname="BatonRoleDown"}', lambda series: not series, timeout_s=20)
