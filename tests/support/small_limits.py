"""Limits of the product, lowered so that tiny models reach them."""

import importlib
import random
import sys
from collections.abc import Mapping, Sequence

import pytest

from engine.pipeline.frame_parts import FrameParts
from pool.pipeline.part_memory import PartMemory

USERS = ("pool.stage.handoff",)  # other modules that have a limit under its name
PACKAGES = ("decode", "engine", "models", "pool", "prefill", "router", "transfer")
# Module and name of each limit, with the values that it may take. Limits that a peer's sender must
# respect, such as the largest accepted message, are not among them.
LIMITS: Mapping[str, Sequence[int]] = {
    "decode.event_sender:MAX_JOINED": (1, 2),
    "decode.proposers:PROBE_STEPS": (1, 2),
    "decode.scheduler:MAX_ENDED_KEYS": (1, 2),
    "decode.suffix_index:MAX_SINGLE_TOKENS": (1, 3),
    "decode.suffix_index:MAX_VISITS": (1,),
    "engine.pipeline.tensor_channel:MAX_MESSAGES_UNDER_WAY": (1, 2),
    "engine.sampling.guided:MAX_FORCED": (1, 2),
    "engine.sampling.sampler:_CHANGED_TOGETHER": (1, 2),
    "models.blocks.linear:SHARED_OUT_BYTES": (1, 2_000, 20_000),
    "models.blocks.low_rank:_MAX_TABLES": (1, 2),
    "pool.prefix.block_reads:MAX_READS": (1, 2),
    "pool.prefix.block_reads:RETRY": (1, 2),
    "pool.prefix.journal:MAX_NAMES": (1, 3),
    "pool.pulls.lender:MAX_LOANS": (1, 2),
    "pool.request.router_call:MAX_EVENTS": (1, 2),
    "pool.request.router_call:MAX_TOKENS": (1, 4),
    "pool.tiers.cache_server:LOOKED_UP": (1, 3),
    "pool.tiers.copies:MAX_POINTS": (1, 5),
    "pool.tiers.folder:_MAX_BUFFERS": (1, 3),
    "pool.tiers.stage_blocks:AHEAD": (0, 1, 8),
    "prefill.chunks:SCORED_TOKENS": (1, 5, 30),
    "router.request.answer:MAX_JOINED": (1, 3),
    "router.request.answer:MAX_UNREAD": (1, 2),
    "router.request.resumption:FED_AT_ONCE": (1, 3),
    "router.request.waiting_line:LOOK_AHEAD": (1, 2),
    "router.workers.placement:MOST_COMPARED": (1, 2),
    "router.workers.worker_call:MAX_BYTES": (200, 2_000),
    "router.workers.worker_call:MAX_INPUTS": (1, 2),
    "transfer.agent.prompts:LOOK_AHEAD": (1, 2),
    "transfer.plan.copy_plan:MAX_RUN_BYTES": (256, 4_096),
    "transfer.ucx.stage_channel:MAX_STEPS": (1, 3),
    "transfer.ucx.transport:MAX_PROGRESS_STEPS": (1, 2),
}


def lower_limits(dice: random.Random, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Lower about half of the limits in all modules that use them, and return these by name.

    The processes of the test's cluster must run in this one.
    """
    lowered = {}
    # Also those that are loaded on demand: later, they would keep the lowered limit.
    for home in (*(limit.partition(":")[0] for limit in LIMITS), *USERS):
        importlib.import_module(home)
    modules = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in PACKAGES
    ]
    for limit, values in LIMITS.items():
        home, _, name = limit.partition(":")
        if dice.random() < 0.5:
            continue
        value = lowered[limit] = dice.choice(values)
        before = vars(sys.modules[home])[name]
        for module in modules:
            if vars(module).get(name) is before:
                monkeypatch.setattr(module, name, value)
    for channel in (PartMemory, FrameParts):
        if dice.random() < 0.5:
            value = lowered[f"{channel.__name__}.max_bytes"] = dice.choice((64, 999, 5_000))
            monkeypatch.setattr(channel, "max_bytes", value)
    return lowered
