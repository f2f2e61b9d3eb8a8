"""A real Prometheus with the project's rules watches two clusters that meet the condition of every
alert.

"shop" is a cluster of real processes with a draft whose tokens are hardly ever accepted, uneven
stages and too few pages, under load; its prefill worker is killed, and stage 0 of its decode pool.
"lab" runs in this process, so that its bytes, pages and workers can be broken on purpose. Every
query of every dashboard must give series, every alert must fire and clear.

Time runs faster: every duration of the rules is divided by SCALE, scrapes and evaluations come four
times a second. Thresholds that are a user's patience, or a matter of how busy this machine is, are
lowered, and a window that this machine may leave without a first token is longer: see LOWERED. Of
the dashboards one is rendered, or all if the pictures are to be kept.
"""

import asyncio
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import yaml
from safetensors.torch import load_file, save_file

from baton.adapters import change_adapters
from baton.client import AsyncBatonClient
from baton.values import Query, Sampling, Stop
from decode.worker import DecodeRole
from pool.prefix.cache import PrefixCache
from pool.prefix.tree import Found
from prefill.worker import PrefillRole
from protos import decode_pb2, decode_pb2_grpc, transfer_pb2, types_pb2
from runtime.errors import BatonError
from runtime.rpc.client import open_channel
from runtime.security.access import ChannelSecurity
from tests.deploy.manifests import DEPLOY
from tests.support.cluster.clusters import RunningCluster, running_cluster
from tests.support.cluster.laboratory import PLENTY, DamagingUcx, Laboratory, laboratory
from tests.support.cluster.questions import as_query, make_questions
from tests.support.drafts.eagle import save_draft
from tests.support.models.adapters import write_adapter
from tests.support.models.checkpoints import make_checkpoint
from tests.support.network.ports import taken_port
from tools.panels.catalogue import DASHBOARDS
from tools.pictures import draw, plain
from tools.prometheus import LOCAL, Prometheus, Target, prometheus, scaled

SCALE = 240  # an alert that waits ten minutes waits two and a half seconds
INTERVAL_S, RATE_INTERVAL = 0.25, "4s"
LOWERED = {
    "BatonPreempting": ("[2500ms]) > 0.1", "[30s]) > 0.02"),
    "BatonQueueOld": ("> 30", "> 2"),
    "BatonFirstTokenSlow": ("> 5", "> 2"),
    "BatonPipelineIdle": ("> 0.5", "> 0.2"),
    "baton:ttft_seconds:p99_5m": ("[1250ms]", "[10s]"),
}
WAIT_S = 120.0
RULES = (DEPLOY / "alerts" / "rules.yaml").read_text()


class Watch:
    """Which alerts have fired, and where."""

    def __init__(self, server: Prometheus) -> None:
        self._server = server
        self._began_s = time.monotonic()
        self.fired: set[tuple[str, str]] = set()

    async def run(self) -> None:
        while True:
            # an alert may be over between two looks
            window = f"{max(1, round(time.monotonic() - self._began_s))}s"
            for series in await self._server.query(
                f'count_over_time(ALERTS{{alertstate="firing"}}[{window}])'
            ):
                self.fired.add(
                    (series["metric"]["alertname"], series["metric"].get("namespace", ""))
                )
            await asyncio.sleep(0.2)

    async def until_fired(self, namespace: str, *alerts: str) -> None:
        print(
            f"{time.monotonic() - self._began_s:6.1f} s: {namespace} waits for {', '.join(alerts)}"
        )
        try:
            async with asyncio.timeout(WAIT_S):
                while not {(alert, namespace) for alert in alerts} <= self.fired:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            missing = {(alert, namespace) for alert in alerts} - self.fired
            pending = await self._server.query('ALERTS{alertstate="pending"}')
            seen = {
                f"{one['metric'].get('namespace')} {one['metric'].get('job', '')}": one["value"][1]
                for one in await self._server.query(
                    "baton_pp_bubble_ratio or baton_preemptions_total"
                )
            }
            raise AssertionError(
                f"did not fire within {WAIT_S} s: {missing}; pending {pending}; {seen}"
            ) from None


def _rules() -> dict[str, object]:
    rules = scaled(RULES, SCALE)
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        name = rule.get("alert", rule.get("record"))
        if name in LOWERED:
            before, after = LOWERED[name]
            assert before in rule["expr"]
            rule["expr"] = rule["expr"].replace(before, after)
    return rules


def _named(kind: str) -> set[str]:
    return {
        rule[kind]
        for group in yaml.safe_load(RULES)["groups"]
        for rule in group["rules"]
        if kind in rule
    }


async def _ask(client: AsyncBatonClient, query: Query) -> None:
    with suppress(BatonError):
        await client.complete(
            query, timeout_s=600
        )  # a router refuses what a slow machine cannot end in time


@asynccontextmanager
async def load(
    client: AsyncBatonClient, *, clients: int, prompt: int, tokens: int
) -> AsyncIterator[None]:
    """Run this many clients, each of which sends its next request after a response."""

    async def ask_on(seed: int) -> None:
        while True:
            for index in range(100):
                await _ask(
                    client,
                    Query(
                        (index + 1,) * prompt, Sampling(seed=seed), Stop(tokens, ignore_eos=True)
                    ),
                )
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(ask_on(seed)) for seed in range(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def shop_troubles(shop: RunningCluster, watch: Watch) -> None:
    # An answer outgrows the two pages that it begins with, and five of them leave one free. It is
    # counted at its end.
    async with load(shop.client, clients=6, prompt=60, tokens=80):
        await watch.until_fired(
            "shop", "BatonPreempting", "BatonPipelineIdle", "BatonDraftsRejected"
        )
        killing = asyncio.create_task(_crash_on(shop))
        await watch.until_fired("shop", "BatonProcessDown", "BatonRoleDown")
        killing.cancel()
        await shop.cluster.wait_serving(timeout_s=60)
        await asyncio.sleep(2)  # retries that ended well


async def _crash_on(shop: RunningCluster) -> None:
    """Make two processes exit at every start: one killed once is back before a scrape misses it."""
    while True:
        for name in ("prefill-0", "decode-0.0"):
            shop.cluster.processes[name].kill()
            await asyncio.sleep(
                0.2
            )  # so that each interrupts something at first: streams soon end without prefill


async def lab_troubles(
    lab: Laboratory, server: Prometheus, watch: Watch, shop: list[Target]
) -> None:
    known = [*shop, *_lab_targets(lab)]
    await lab.start_worker("extra", PrefillRole())  # no router knows it
    server.watch([*shop, *_lab_targets(lab)])
    await watch.until_fired("lab", "BatonWorkerUnused")
    server.watch(known)
    await lab.roles.pop("extra").end()
    await _refused_handshakes(lab, 3)

    lab.limit_clients(60)  # and RetryInfo of up to a second, which the client keeps
    async with load(lab.client, clients=12, prompt=20, tokens=4):
        await watch.until_fired("lab", "BatonQuotaSpent")
    lab.limit_clients(PLENTY)

    await _misled(lab, watch)

    DamagingUcx.armed = True
    async with load(lab.client, clients=2, prompt=70, tokens=4):
        await watch.until_fired(
            "lab",
            "BatonBytesDamaged",
            "BatonHandoffsFail",
            "BatonRequestsFail",
            "BatonErrorBudgetFast",
            "BatonErrorBudgetSlow",
        )
    DamagingUcx.armed = False

    held = await lab.hold_every_page()
    async with load(lab.client, clients=60, prompt=20, tokens=40):
        await watch.until_fired("lab", "BatonPagesShort", "BatonQueueOld")
        await lab.release(held)
        await watch.until_fired("lab", "BatonFirstTokenSlow")

    await lab.lose_a_page()
    await watch.until_fired("lab", "BatonPoolImbalance", "BatonRoleDown")
    await lab.roles["decode"].end()
    await watch.until_fired("lab", "BatonProcessDown")
    await lab.start_worker("decode", DecodeRole())
    await lab.until_serving()


async def _misled(lab: Laboratory, watch: Watch) -> None:
    """Let workers find nothing of what they have cached, and have told the router."""
    query = replace(as_query(make_questions(1, seed=3)[0]), prompt=tuple(range(3, 143)))
    await lab.client.complete(query, timeout_s=60)

    async def ask_on() -> None:
        while True:
            await _ask(lab.client, query)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixCache, "find", lambda *_: Found())
        asking = asyncio.create_task(ask_on())
        await watch.until_fired("lab", "BatonCacheMispredicted")
        asking.cancel()


async def _refused_handshakes(lab: Laboratory, count: int) -> None:
    """Send terms of another model, as a router that confuses pools does."""
    request = types_pb2.EngineRequest(request_id="stranger", prompt_token_ids=[1], max_tokens=1)
    opening = decode_pb2.DecodeOpen(
        request=request,
        source=transfer_pb2.SourceTerms(
            compatibility="another", num_tokens=1, page_size=64, chunk_tokens=64, page_ids=[1]
        ),
    )
    async with open_channel(lab.roles["decode"].announcement.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Serve()
        for key in range(1, count + 1):
            await call.write(
                decode_pb2.DecodeInputs(inputs=[decode_pb2.DecodeInput(key=key, open=opening)])
            )
            message = await call.read()
            assert isinstance(message, decode_pb2.DecodeEvents)
            assert [event.ended.code for event in message.events] == [
                grpc.StatusCode.FAILED_PRECONDITION.value[0]
            ]
            await asyncio.sleep(2 * INTERVAL_S)
        call.cancel()


def _lab_targets(lab: Laboratory) -> list[Target]:
    return [
        Target(name, role.announcement.metrics_port or 0, "lab") for name, role in lab.roles.items()
    ]


async def _is_quiet(
    shop: RunningCluster, lab: Laboratory, server: Prometheus, num_targets: int
) -> None:
    """Check two healthy clusters under light load: every recording rule has series and no relevant
    alert fires."""
    await server.until(
        "baton_build_info", lambda series: len(series) == num_targets, timeout_s=WAIT_S
    )
    questions = [
        as_query(question) for question in make_questions(3, seed=5, max_prompt=40, max_tokens=6)
    ]
    for _ in range(3):  # a labelled counter's first sample is no increase yet
        await asyncio.gather(
            *(
                client.complete(query, timeout_s=60)
                for query in questions
                for client in (shop.client, lab.client)
            )
        )
        await asyncio.sleep(2 * INTERVAL_S)
    async with (  # some rules look back for a second only
        load(shop.client, clients=1, prompt=40, tokens=6),
        load(lab.client, clients=1, prompt=40, tokens=6),
    ):
        for name in sorted(_named("record")):
            await server.until(name, bool, timeout_s=WAIT_S)
    # A target that was held up for half a second is down, with time as fast as this.
    await server.until(
        'ALERTS{alertstate="firing", severity=~"warning|critical"}',
        lambda series: not series,
        timeout_s=WAIT_S,
    )


@pytest.fixture
def port() -> Iterator[int]:
    with taken_port(LOCAL) as taken:
        yield taken + 1  # unused while the one before it is held


@pytest.mark.long
@pytest.mark.timeout(900)  # about a minute when the machine has nothing else to do
async def test_every_panel_shows_something_and_every_alert_fires_and_clears(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3_5_text")
    draft = save_draft(tmp_path / "draft", layers=(0, 1, 3))
    adapters = tmp_path / "adapters"
    write_adapter(adapters / "first", checkpoint, seed=1)
    flags = (
        *("--draft", str(draft), "--no-spec-adaptive", "--adapters", str(adapters)),
        *("--num-pages", "12", "--max-running", "6", "--disk-cache", str(tmp_path / "disk")),
    )
    began = time.time()
    async with (
        prometheus(tmp_path, _rules(), port=port, interval_s=INTERVAL_S) as server,
        running_cluster(
            checkpoint, decode_pp=2, decode_partition="1,3", worker_flags=flags
        ) as shop,
        laboratory(checkpoint, tmp_path, monkeypatch) as lab,
    ):
        targets = [
            Target(name, await shop.metrics_port(name), "shop") for name in shop.cluster.processes
        ]
        server.watch([*targets, *_lab_targets(lab)])
        await _is_quiet(shop, lab, server, len(targets) + len(lab.roles))
        watch = Watch(server)
        await _use_adapters(shop, checkpoint, adapters)
        await _use_disk(shop, tmp_path / "disk")
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch.run())
            await _fail_to_load(shop, checkpoint, adapters)
            await watch.until_fired("shop", "BatonAdapterLoadsFail")
            await shop_troubles(shop, watch)
            await lab_troubles(lab, server, watch, targets)
            watching.cancel()
        assert {alert for alert, _ in watch.fired} == _named("alert")
        await server.until(
            'ALERTS{alertstate="firing"}', lambda series: not series, timeout_s=WAIT_S
        )
        ended = time.time()
        dead = [
            f"{spec.title}, {panel.title}: {query.expr}"
            for spec in DASHBOARDS
            for panel in spec.panels
            for query in panel.queries
            if not await _has_values(server, query.expr, began, ended)
        ]
        assert dead == [], "queries without any series"
        pictures = os.environ.get("BATON_PICTURES")
        for spec in DASHBOARDS if pictures else DASHBOARDS[:1]:
            path = Path(pictures or tmp_path) / f"{spec.uid}.png"
            await draw(server, spec, path, start_s=began, end_s=ended, rate_interval=RATE_INTERVAL)
            assert path.stat().st_size > 10_000


async def _use_adapters(shop: RunningCluster, checkpoint: Path, folder: Path) -> None:
    """Load an adapter while the cluster serves, and ask it."""
    write_adapter(folder / "second", checkpoint, seed=2)
    await change_adapters(shop.cluster.address, ChannelSecurity(), load="second")
    (question,) = make_questions(1, seed=1, max_prompt=40, max_tokens=8)
    async with asyncio.timeout(30):
        while "second" not in (await shop.client.model_info()).adapters:
            pass
    await shop.client.complete(as_query(replace(question, adapter="second")), timeout_s=60)


async def _fail_to_load(shop: RunningCluster, checkpoint: Path, folder: Path) -> None:
    """Ask for an adapter of another model."""
    weights = write_adapter(folder / "foreign", checkpoint, seed=3) / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file(
        {name: tensor[:-1] if "lora_B" in name else tensor for name, tensor in tensors.items()},
        weights,
    )
    answers = await change_adapters(shop.cluster.address, ChannelSecurity(), load="foreign")
    assert all("is for another model" in answer.error for answer in answers), answers
    shutil.rmtree(folder / "foreign")  # workers do not start with it


async def _use_disk(shop: RunningCluster, folder: Path) -> None:
    """Ask a prompt of a page again once only the disk has it."""
    query = replace(as_query(make_questions(1, seed=1)[0]), prompt=tuple(range(3, 103)))
    await shop.client.complete(query, timeout_s=60)
    async with asyncio.timeout(30):
        while not list(folder.rglob("state.*")):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.05)
    await shop.client.flush_caches()
    completion = await shop.client.complete(query, timeout_s=60)
    assert completion.finish.usage.cached_tokens == 64


async def _has_values(server: Prometheus, expr: str, began: float, ended: float) -> bool:
    series = await server.query_range(plain(expr, RATE_INTERVAL), began, ended, step_s=1)
    return any(math.isfinite(float(value)) for line in series for _, value in line["values"])
