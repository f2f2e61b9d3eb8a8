"""Layouts of a storm's cluster: the usual one, or one that a seed draws."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRAIN = ("--drain-s", "2")
PULLS = ("--pull-tokens", "64")
DIVISIONS = ((1, 1), (1, 1), (2, 1), (1, 2), (3, 1))  # stages, ranks


@dataclass(frozen=True)
class StormLayout:
    """Pools and flags of a cluster.

    `pools` are fields of `ClusterConfig`. With `has_disk` workers keep prefix caches on disk.
    """

    pools: Mapping[str, Any]
    worker_flags: tuple[str, ...] = DRAIN
    router_flags: tuple[str, ...] = (*DRAIN, *PULLS)
    has_disk: bool = False

    def flags_of_workers(self, folder: Path) -> tuple[str, ...]:
        """Return the flags of every worker; what they keep is in `folder`."""
        disk = ("--disk-cache", str(folder / "blocks")) if self.has_disk else ()
        return (*self.worker_flags, *disk)


def usual_layout(seed: int, draft: Path | None) -> StormLayout:
    """Return two pools of each role, with stages and drafts; the policy alternates by seed."""
    # Workers in turn pull from each other most of their prompts.
    policy = ("prefix_cache", "round_robin")[seed % 2]
    return StormLayout(
        {"prefill": 2, "decode": 2, "decode_pp": 2},
        (*DRAIN, *(() if draft is None else ("--draft", str(draft)))),
        (*DRAIN, *PULLS, "--policy", policy),
    )


def random_layout(seed: int, draft: Path | None, *, has_adapters: bool) -> StormLayout:
    """Draw roles, divisions, drafts, caches, limits and policy."""
    dice = random.Random(seed)
    pools = _random_pools(dice, has_adapters=has_adapters)
    flags = _random_flags(dice, draft)
    policy = dice.choice(("prefix_cache", "round_robin"))
    has_data_ranks = any(name.endswith("dp_attention") for name in pools)
    has_disk = not has_data_ranks and dice.random() < 0.4
    return StormLayout(pools, flags, (*DRAIN, *PULLS, "--policy", policy), has_disk=has_disk)


def _random_pools(dice: random.Random, *, has_adapters: bool) -> dict[str, int]:
    kind = dice.choice(("apart", "apart", "both roles", "mixed"))
    roles, count = {
        "apart": (("prefill", "decode"), 2),
        "both roles": (("worker",), 3),
        "mixed": (("prefill", "decode", "worker"), 1),
    }[kind]
    pools = {"prefill": 0, "decode": 0} | dict.fromkeys(roles, count)
    for role in roles:
        stages, ranks = dice.choice(DIVISIONS)
        pools |= {f"{role}_pp": stages, f"{role}_tp": ranks}
        if ranks > 1 and not has_adapters and dice.random() < 0.4:
            pools[f"{role}_dp_attention"] = ranks
    return pools


def _random_flags(dice: random.Random, draft: Path | None) -> tuple[str, ...]:
    flags = [*DRAIN]
    drafting = dice.choice(("none", "model", "model", "text"))
    if drafting == "model" and draft is not None:
        flags += ["--draft", str(draft)]
    elif drafting == "text":
        flags += ["--draft", "suffix"]
    if dice.random() < 0.3:  # so that requests are preempted
        flags += ["--num-pages", "16", "--max-running", "6"]
    if dice.random() < 0.3:
        flags += ["--chunk-tokens", "64"]
    return tuple(flags)
