"""Random clusters and conversations: every response has the bits of one process.

A seed draws the model, the pools and their divisions, drafts, adapters, caches, limits and the
router's policy; in half of the clusters limits of the product are low. Each conversation has three
turns, so that later ones find state in one tier or another, and some requests are aborted and asked
again.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.client import AsyncBatonClient
from engine.core.numerics import WeightFormat
from engine.core.request import Request, SamplingParams
from engine.speculative.contracts.config import SUFFIX
from tests.support.cache_servers import running_server
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.drafts.eagle import save_draft
from tests.support.grids import mostly_long
from tests.support.models.adapters import write_adapter
from tests.support.models.checkpoints import FAMILY_NAMES, RELATED_NAMES, make_checkpoint
from tests.support.small_limits import lower_limits

EAGLE = ("llama", "qwen3_5_text")  # families of the width of the random draft
ORDINARY = ("llama", "mistral", "qwen2", "qwen3")  # families of ordinary drafts
ADAPTED = (*EAGLE, "gemma3", "glm4_moe", "mixtral", "qwen3_moe")
WINDOWS = ("gemma3", "gemma4", "gpt_oss")
DIVISIONS = ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1))  # stages, ranks
NUM_TURNS = 3
NUM_CONVERSATIONS = 4
MAX_TOKENS = 450  # of a conversation, about
FEW = tuple((token, 100.0) for token in (5, 6, 7))  # responses of these tokens repeat themselves


@dataclass
class Drawn:
    """A random cluster. `layout` and `settings` are arguments of `cluster_in_process`."""

    family: str
    dtype: torch.dtype
    weight_format: WeightFormat
    layout: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ("",)


def drawn(dice: random.Random, folder: Path) -> Drawn:
    found = Drawn(
        dice.choice((*FAMILY_NAMES, *RELATED_NAMES, *EAGLE * 3, *ORDINARY * 3)),
        dtype := dice.choice((torch.bfloat16, torch.float32)),
        dice.choice((WeightFormat.MODEL, *WeightFormat))
        if dtype is torch.bfloat16
        else WeightFormat.MODEL,
    )
    page_size = dice.choice((16, 32, 64))
    found.settings |= {"page_size": page_size, "chunk_tokens": dice.choice((64, 128))}
    found.settings["weights"] = found.weight_format.value
    is_aggregated = dice.random() < 0.4
    roles = ("worker",) if is_aggregated else ("prefill", "decode")
    for role in roles:
        stages, ranks = dice.choice(DIVISIONS)
        found.layout |= {f"{role}_pp": stages, f"{role}_tp": ranks}
    if is_aggregated:
        found.layout |= {"worker": {}, "num_workers": dice.choice((1, 2))}
    elif dice.random() < 0.3:
        found.layout["other_prefill"] = dice.choice(DIVISIONS)
    if not is_aggregated and dice.random() < 0.3:
        found.settings["local_rest_tokens"] = dice.choice((8, 64))
    if dice.random() < 0.3:
        found.settings["max_running"] = dice.choice((1, 2, 3))
    if dice.random() < 0.3:
        found.settings["disk_cache"] = folder / "disk"
    if dice.random() < 0.6:
        found.layout["router"] = {
            "pull_tokens": dice.choice((1, 64)),
            "watch_interval_s": 0.05,
            "policy": dice.choice(("prefix_cache", "round_robin")),
        }
    if found.family in ADAPTED and dice.random() < 0.5:
        found.adapters = ("", "first", "second")
        found.settings["adapters"] = folder / "adapters"
    _draw_drafts(dice, found, folder, page_size)
    _draw_limits(dice, found, page_size)
    for role in roles:
        found.layout[role] = {**found.layout.get(role, {}), **_drawn_pool(dice, found, role)}
    return found


@asynccontextmanager
async def drawn_tiers(dice: random.Random, folder: Path) -> AsyncIterator[dict[str, Any]]:
    """Yield settings of tiers other than the disk, with their server."""
    found = {"host_cache_mb": dice.choice((1, 64))} if dice.random() < 0.3 else {}
    if dice.random() < 0.3:
        with running_server(folder) as server:
            yield found | server.settings
    else:
        yield found


def _draw_limits(dice: random.Random, found: Drawn, page_size: int) -> None:
    """Draw how much there may be at a time, and what is kept."""
    if dice.random() < 0.3:  # two conversations fit, so that others are preempted
        found.settings["num_pages"] = 2 * (MAX_TOKENS // page_size) + 4
    if dice.random() < 0.3:
        found.settings["max_landing"] = dice.choice((1, 2))
    if dice.random() < 0.2:
        found.settings["prefix_snapshots"] = dice.choice((1, 3))
    for cache in ("prefix_cache", "decode_cache"):
        if dice.random() < 0.15:
            found.settings[cache] = False


def _drawn_pool(dice: random.Random, found: Drawn, role: str) -> dict[str, Any]:
    """Draw the data ranks of a pool, and what it computes at the same time."""
    stages, ranks = (found.layout[f"{role}_{way}"] for way in ("pp", "tp"))
    has_data_ranks = ranks > 1 and "other_prefill" not in found.layout and dice.random() < 0.5
    if has_data_ranks:
        return {"dp_attention": ranks}
    if ranks > 1 and "other_prefill" not in found.layout:
        return {"overlap_tokens": dice.choice((0, 2, 40))}
    if role == "decode" and stages == ranks == 1 and "draft" not in found.settings:
        return {"overlap_steps": dice.random() < 0.5}
    return {}


def _draw_drafts(dice: random.Random, found: Drawn, folder: Path, page_size: int) -> None:
    """Draw no draft, the own text, a random draft that is nearly always wrong, or the model itself,
    which is nearly always right."""
    kinds = ["none", "suffix"]
    kinds += ["eagle"] * (found.family in EAGLE) + ["itself"] * 2 * (found.family in ORDINARY)
    kind = dice.choice(kinds)
    if kind == "none":
        return
    found.settings["spec_adaptive"] = dice.random() < 0.5
    if kind == "suffix":
        longest = page_size - 1 if found.family.startswith(WINDOWS) else 12
        num_tokens = min(longest, dice.choice((3, 6, 12)))
        found.settings |= {"draft": SUFFIX, "spec_draft_tokens": num_tokens}
        return
    topk, steps, num_tokens = dice.choice(((1, 5, 5), (1, 3, 3), (4, 4, 12), (3, 3, 7)))
    found.settings |= {
        "draft": folder / kind,
        "spec_topk": topk,
        "spec_steps": steps,
        "spec_draft_tokens": num_tokens,
        "spec_suffix": dice.random() < 0.7,
        "spec_prompt": dice.random() < 0.7,
    }


def write_files(cluster: Drawn, folder: Path) -> Path:
    """Write the model, its adapters and its draft; return the model's folder."""
    model = make_checkpoint(folder, cluster.family, dtype=cluster.dtype)
    for number, name in enumerate(cluster.adapters[1:]):
        write_adapter(folder / "adapters" / name, model, seed=number, rank=8 - 3 * number)
    if cluster.settings.get("draft") == folder / "eagle":
        save_draft(folder / "eagle", layers=(0, 1, 3))
    (folder / "itself").symlink_to(model)
    return model


def first_prompts(dice: random.Random) -> list[list[int]]:
    prompts = [
        dice.choices(range(3, 200), k=dice.choice((5, 60, 130, 200)))
        for _ in range(NUM_CONVERSATIONS)
    ]
    if dice.random() < 0.5:
        prompts[0] = dice.choices(range(3, 200), k=7) * 20
        prompts[1] = [*prompts[0][:100], *prompts[1]]
    return prompts


async def ask(client: AsyncBatonClient, request: Request, abort_s: float | None) -> Shown:
    if abort_s is not None:
        query = as_query(replace(request, request_id=f"{request.request_id} aborted"))
        aborted = asyncio.create_task(client.complete(query, timeout_s=60))
        await asyncio.sleep(abort_s)
        aborted.cancel()
    return shown(await client.complete(as_query(request), timeout_s=60))


@pytest.mark.parametrize("seed", mostly_long(range(24), kept=(5, 21)))
async def test_any_cluster_gives_the_bits_of_one_process(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    cluster = drawn(dice, tmp_path)
    limits = lower_limits(random.Random(seed), monkeypatch) if seed % 2 else {}
    model = write_files(cluster, tmp_path)
    reference = Reference(
        model,
        weight_format=cluster.weight_format,
        adapters=cluster.settings.get("adapters"),
    )
    prompts = first_prompts(dice)
    adapters = dice.choices(cluster.adapters, k=NUM_CONVERSATIONS)
    async with (
        drawn_tiers(random.Random(-seed - 1), tmp_path) as tiers,
        cluster_in_process(model, **cluster.layout, **cluster.settings, **tiers) as client,
    ):
        for turn in range(NUM_TURNS):
            requests = [
                Request(
                    f"turn {turn} of {number}",
                    tuple(prompt),
                    dice.randint(1, 24),
                    SamplingParams(
                        temperature=dice.choice((0.0, 0.9)),
                        seed=number,
                        logit_bias=dice.choice(((), FEW)),
                    ),
                    num_top_logprobs=0,
                    adapter=adapter,
                )
                for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
            ]
            aborts = [dice.random() * 0.1 if dice.random() < 0.2 else None for _ in requests]
            expected = on_the_wire(reference.answers(requests))
            assert (
                await asyncio.gather(*map(ask, [client] * len(requests), requests, aborts))
                == expected
            ), (cluster, limits)
            for prompt, answer in zip(prompts, expected, strict=True):
                prompt += [
                    *(token_id for token_id, _ in answer),
                    *dice.choices(range(3, 200), k=dice.choice((3, 40))),
                ]
            await asyncio.sleep(dice.choice((0, 0.3)))
