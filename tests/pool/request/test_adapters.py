"""The adapters of a pool over scripted stages: what is accepted, what is in memory, what goes."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import save_file

from models.adapters import read_adapters
from pool.request import adapter_memory, adapters
from pool.request.adapter_memory import StagesAdapters
from pool.request.adapters import PoolAdapters
from runtime.errors import CapacityError, ConfigError, UnavailableError
from runtime.model_files.adapter_folders import CONFIG, MAX_ADAPTERS, WEIGHTS
from runtime.observe.metrics.pools import AdapterMetrics
from tests.support.models.tiny_models import HYBRID, tiny

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
NUM_VALUES = 2 * 4 * 8  # of an adapter of rank 4 with eight inputs and outputs


def write(folder: Path, name: str, *, alpha: int = 8, width: int = 8) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": alpha})
    )
    save_file(
        {
            f"{MODULE}.lora_A.weight": torch.ones(4, width),
            f"{MODULE}.lora_B.weight": torch.ones(width, 4),
        },
        folder / name / WEIGHTS,
    )


class Stages:
    """Stages that hold what they are told to, after some turns of the event loop."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.bad: set[str] = set()  # keys that cannot be loaded
        self.error: Exception | None = None  # of every command
        self.running: Counter[str] = Counter()  # requests in the engine
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.on_hold = self.hold

    async def hold(self, keys: Sequence[str]) -> None:
        lost = [key for key in self.running if self.running[key] and key not in keys]
        assert not lost, f"{lost} went while requests had them"
        await self.is_open.wait()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if bad := self.bad & set(keys):
            raise ConfigError(f"no {sorted(bad)}", field="adapters")
        self.held = list(keys)

    async def has_any(self, key: str) -> bool:
        await asyncio.sleep(0)
        return bool(self.running[key])


class Rig:
    """The adapters of a pool in `folder`, with room for `room` of one size."""

    def __init__(self, folder: Path | None, room: int, num_loaded: int = 0) -> None:
        self.stages = Stages()
        self.registry = CollectorRegistry()
        known = () if folder is None else read_adapters(folder)
        model = tiny(HYBRID)
        itemsize = getattr(torch, model.facts.dtype).itemsize
        model = replace(model, adapters=known, adapter_bytes=room * NUM_VALUES * itemsize)
        self.keys = {adapter.name: adapter.key for adapter in known}
        self.stages.held = list(self.keys.values())[:num_loaded]
        self.pool = PoolAdapters(
            folder,
            model,
            self.stages.held,
            StagesAdapters(lambda keys: self.stages.on_hold(keys), self.stages.has_any),
            AdapterMetrics.create(self.registry),
        )

    @asynccontextmanager
    async def request(self, key: str) -> AsyncIterator[None]:
        """Run a request, which stays in the engine for a moment after its end."""
        async with self.pool.leased(key):
            assert key in self.stages.held
            self.stages.running[key] += 1
            try:
                yield
            finally:
                asyncio.get_running_loop().call_later(0.001, self._gone, key)

    def _gone(self, key: str) -> None:
        self.stages.running[key] -= 1

    async def until_dropped(self, key: str) -> None:
        async with asyncio.timeout(5):
            while key in self.stages.held:  # noqa: ASYNC110 - a timer of the pool sets no event
                await asyncio.sleep(0.01)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"baton_{name}", labels)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abcd":
        write(tmp_path, name)
    return tmp_path


async def test_the_one_that_was_not_used_for_longest_leaves_memory(folder: Path) -> None:
    rig = Rig(folder, room=2, num_loaded=2)
    a, b, c = (rig.keys[name] for name in "abc")
    assert rig.pool.loaded == [a, b]
    for key in (b, a):
        async with rig.request(key):
            pass
    async with rig.request(c):
        assert rig.pool.loaded == rig.stages.held == [a, c]
        assert rig.value("adapter_requests", adapter="c") == 1
    assert rig.pool.accepted == list(rig.keys.values())
    assert rig.value("adapter_evictions_total") == rig.value("adapter_load_seconds_count") == 1
    assert rig.value("adapters", state="loaded") == rig.value("adapters", state="cold") == 2


async def test_requests_that_wait_for_one_adapter_share_its_load(folder: Path) -> None:
    rig = Rig(folder, room=1)
    rig.stages.is_open.clear()

    async def run() -> None:
        async with rig.request(rig.keys["a"]):
            pass

    waiting = [asyncio.create_task(run()) for _ in range(5)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    rig.stages.is_open.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in ended] == [asyncio.CancelledError, *(type(None),) * 4]
    assert rig.value("adapter_loads_total", result="loaded") == 1
    assert rig.value("adapter_requests", adapter="a") == 0


async def test_a_load_waits_for_the_end_of_requests_but_not_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_memory, "ROOM_S", 0.05)
    rig = Rig(folder, room=1)
    async with rig.request(rig.keys["a"]):
        with pytest.raises(CapacityError, match="use all memory for adapters"):
            async with rig.request(rig.keys["b"]):
                pass
        assert rig.stages.held == [rig.keys["a"]]
    async with rig.request(rig.keys["b"]):
        assert rig.stages.held == [rig.keys["b"]]


async def test_a_storm_never_takes_an_adapter_from_a_request(folder: Path) -> None:
    rig = Rig(folder, room=2)
    rng = random.Random(7)
    runs = Counter[str]()

    async def client() -> None:
        for _ in range(40):
            key = rng.choice(list(rig.keys.values()))
            async with rig.request(key):
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
                    assert key in rig.stages.held
                    assert len(rig.pool.loaded) <= 2
            runs[key] += 1

    await asyncio.gather(*(client() for _ in range(6)))
    assert sum(runs.values()) == 240
    assert len(runs) == len(rig.keys)
    assert rig.value("adapter_memory_used_bytes") == rig.value("adapter_memory_limit_bytes")


async def test_what_cannot_be_loaded_is_not_accepted(
    folder: Path,
) -> None:
    rig = Rig(folder, room=1, num_loaded=1)
    a, b = rig.keys["a"], rig.keys["b"]
    rig.stages.bad = {b}
    with pytest.raises(UnavailableError, match="no "):
        async with rig.request(b):
            pass
    with pytest.raises(UnavailableError, match=r"does not have the adapter 'b' .*: no "):
        rig.pool.check(b)
    assert b not in rig.pool.accepted
    with pytest.raises(ConfigError, match="no "):
        await rig.pool.load("b")
    rig.stages.bad.clear()
    assert (await rig.pool.load("b")).loaded
    assert b in rig.pool.accepted
    async with rig.request(a):
        assert rig.stages.held == [a]


async def test_a_lost_stage_refuses_no_adapter(folder: Path) -> None:
    rig = Rig(folder, room=1)
    rig.stages.error = UnavailableError("a stage died")
    with pytest.raises(UnavailableError, match="a stage died"):
        async with rig.request(rig.keys["a"]):
            pass
    with pytest.raises(UnavailableError, match="a stage died"):
        await rig.pool.formed()
    rig.stages.error = None
    await rig.pool.formed()
    async with rig.request(rig.keys["a"]):
        pass


async def test_a_new_pool_holds_what_all_of_its_stages_can_load(folder: Path) -> None:
    rig = Rig(folder, room=3, num_loaded=3)
    rig.stages.bad = {rig.keys["b"]}
    rig.stages.held = []
    await rig.pool.formed()
    kept = [rig.keys["a"], rig.keys["c"]]
    assert rig.stages.held == rig.pool.loaded == kept
    assert rig.pool.accepted == [*kept, rig.keys["d"]]


async def test_a_request_knows_whether_a_new_pool_has_its_adapter(folder: Path) -> None:
    """Its file may have been replaced, so that a stage that joins again cannot load it."""
    rig = Rig(folder, room=3, num_loaded=3)
    a, b, d = (rig.keys[name] for name in "abd")
    async with rig.request(a), rig.request(b):
        rig.stages.bad, rig.stages.held = {b}, []
        rig.stages.running.clear()  # the engine's requests ended with the pool
        await rig.pool.formed()
        rig.pool.check_loaded(a)
        with pytest.raises(UnavailableError, match=r"does not have the adapter 'b' .* no "):
            rig.pool.check_loaded(b)
    with pytest.raises(UnavailableError, match="formed again without the adapter 'd'"):
        rig.pool.check_loaded(d)


async def test_a_pool_that_breaks_while_it_forms_counts_nothing_as_loaded(folder: Path) -> None:
    """What a stage does not hold is loaded again before a request has it."""
    rig = Rig(folder, room=3, num_loaded=3)
    a, b, c = (rig.keys[name] for name in "abc")
    rig.stages.bad, rig.stages.held = {a}, []
    hold, calls = rig.stages.hold, list[Sequence[str]]()

    async def breaking(keys: Sequence[str]) -> None:
        calls.append(keys)
        if len(calls) == 3:
            raise UnavailableError("a stage died")
        await hold(keys)

    rig.stages.on_hold = breaking
    with pytest.raises(UnavailableError, match="a stage died"):
        await rig.pool.formed()
    await rig.pool.formed()
    for key in (b, c):
        async with rig.request(key):
            assert key in rig.pool.loaded


async def test_a_new_version_replaces_one_that_requests_still_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "GRACE_S", 0.05)
    monkeypatch.setattr(adapters, "LOOK_S", 0.02)
    rig = Rig(folder, room=3, num_loaded=2)
    changes = list[int]()
    rig.pool.changed = lambda: changes.append(len(rig.pool.accepted))
    old = rig.keys["a"]
    write(folder, "a", alpha=16)
    async with rig.request(old):
        status = await rig.pool.load("a")
        new = f"a@{status.digest}"
        assert status.loaded
        assert new != old
        assert rig.pool.retired == [old]
        assert {old, new} <= set(rig.pool.accepted)
        await asyncio.sleep(0.1)
        assert rig.pool.retired == [old], "a request has it"
    await rig.until_dropped(old)
    assert rig.pool.retired == []
    assert new in rig.pool.loaded
    with pytest.raises(UnavailableError, match="in the version that the request asks for"):
        rig.pool.check(old)
    assert changes[-1] == 4


async def test_an_unloaded_adapter_may_come_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "GRACE_S", 0.05)
    rig = Rig(folder, room=2, num_loaded=1)
    key = rig.keys["a"]
    assert (await rig.pool.unload("a")).retired
    assert rig.pool.retired == [key]
    with pytest.raises(ConfigError, match="no adapter 'a' is offered"):
        await rig.pool.unload("a")
    assert not (await rig.pool.load("a")).retired
    await asyncio.sleep(0.1)
    assert key in rig.pool.loaded
    await rig.pool.unload("a")
    await rig.until_dropped(key)
    assert key not in rig.pool.accepted
    assert (await rig.pool.load("a")).loaded


async def test_what_cannot_be_loaded_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="started without --adapters"):
        await Rig(None, room=0).pool.load("a")
    rig = Rig(folder, room=1)
    write(folder, "wide", width=16)
    for name, says in (
        ("../a", "is no name of an adapter"),
        ("absent", "has no adapter_config.json and no adapter_model.safetensors"),
        ("wide", r"wide needs 1 MiB, and adapters_mb is 0"),
    ):
        with pytest.raises(ConfigError, match=says):
            await rig.pool.load(name)
    for number in range(MAX_ADAPTERS - len(rig.keys)):
        write(folder, f"more-{number}", alpha=number + 1)
        await rig.pool.load(f"more-{number}")
    write(folder, "last")
    with pytest.raises(ConfigError, match=f"offers up to {MAX_ADAPTERS} adapters"):
        await rig.pool.load("last")
    write(folder, "a", alpha=3)
    assert (await rig.pool.load("a")).loaded, "another version of one"
