"""Layouts of a storm's cluster: the usual one, or one that a seed draws."""

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cluster_config import demo_model

DRAIN = ("--drain-s", "2")
PULLS = ("--pull-tokens", "64")
DIVISIONS = ((1, 1), (1, 1), (2, 1), (1, 2), (3, 1), (2, 2))  # stages, ranks
# Flags of workers, and how often they are drawn.
SOMETIMES = (
    (0.3, ("--chunk-tokens", "64")),
    (0.2, ("--max-landing", "2")),
    (0.08, ("--no-prefix-cache",)),
    (0.08, ("--no-decode-cache",)),
    (0.2, ("--prefix-snapshots", "4")),
    (0.2, ("--transport", "tcp")),
    (0.2, ("--threads", "2")),
)
# Each client sends a third of the requests, and retries those beyond its quotas.
LIMITS = """
[often]
weight = 4
concurrent_requests = 3

[seldom]
requests_per_minute = 60
generated_tokens_per_minute = 3000

[free]
"""


@dataclass(frozen=True)
class StormLayout:
    """Pools and flags of a cluster.

    `pools` are fields of `ClusterConfig`. `arithmetic` are flags of workers that change the bits of
    responses. With `has_disk` workers keep prefix caches on disk, with `has_server` at a server. With
    `limits`, a file of weights and quotas, there are the clients that it names.
    """

    pools: Mapping[str, Any]
    worker_flags: tuple[str, ...] = DRAIN
    router_flags: tuple[str, ...] = (*DRAIN, *PULLS)
    arithmetic: tuple[str, ...] = ()
    has_disk: bool = False
    has_server: bool = False
    limits: str = ""
    has_all_features: bool = False

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(tomllib.loads(self.limits))

    def flags_of_workers(self, folder: Path) -> tuple[str, ...]:
        """Return the flags of every worker; what they keep is in `folder`."""
        disk = ("--disk-cache", str(folder / "blocks")) if self.has_disk else ()
        return (*self.worker_flags, *self.arithmetic, *disk)


def draft_of(model: Path) -> Path | None:
    """Return the draft model that is included for this model, or None."""
    return model.with_name("draft") if model == demo_model() else None


def usual_layout(seed: int, draft: Path | None) -> StormLayout:
    """Return two pools of each role, with stages and drafts; the policy alternates by seed."""
    # Workers in turn pull from each other most of their prompts.
    policy = ("prefix_cache", "round_robin")[seed % 2]
    return StormLayout(
        {"prefill": 2, "decode": 2, "decode_pp": 2},
        (*DRAIN, *(() if draft is None else ("--draft", str(draft)))),
        (*DRAIN, *PULLS, "--policy", policy),
    )


def random_layout(seed: int, draft: Path | None, *, may_limit_clients: bool = True) -> StormLayout:
    """Draw roles, divisions, drafts, caches, arithmetic, limits and policy."""
    dice = random.Random(seed)
    pools = _random_pools(dice)
    flags = _random_flags(dice, draft, has_both_roles="worker" in pools)
    all_exchange = all(
        pools[f"{role}_tp"] > 1 and f"{role}_dp_attention" not in pools
        for role in ("prefill", "decode", "worker")
        if pools.get(role)
    )
    if all_exchange and dice.random() < 0.5:
        flags = (*flags, "--overlap-tokens", "32")
    policy = dice.choice(("prefix_cache", "round_robin", "least_load", "power_of_two"))
    has_disk = dice.random() < 0.4
    limits = LIMITS if may_limit_clients and dice.random() < 0.5 else ""
    weights = dice.choice(("model", "model", "int8", "int4"))
    router_flags = _random_router_flags(dice, has_clients=limits != "")
    has_server = dice.random() < 0.4
    if dice.random() < 0.3:
        flags = (*flags, "--host-cache-mb", dice.choice(("1", "64")))
    return StormLayout(
        pools,
        flags,
        (*DRAIN, *PULLS, "--policy", policy, *router_flags),
        () if weights == "model" else ("--weights", weights),
        has_disk,
        has_server,
        limits,
        has_all_features=True,
    )


def _random_pools(dice: random.Random) -> dict[str, int]:
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
        if ranks > 1 and dice.random() < 0.4:
            pools[f"{role}_dp_attention"] = ranks
    return pools


def _random_router_flags(dice: random.Random, *, has_clients: bool) -> list[str]:
    flags = []
    if dice.random() < 0.3:
        flags += ["--holdback", "1=0.8", "--holdback", "10=0.5"]
    if dice.random() < 0.2:  # none is preempted
        flags += ["--preempt-from", "101"]
    if has_clients and dice.random() < 0.4:
        flags += ["--salt-by-client"]
    if dice.random() < 0.2:
        flags += ["--max-waiting", "4"]
    if dice.random() < 0.3:  # connections end under their requests
        flags += ["--max-connection-age-s", "4", "--max-connection-age-grace-s", "1"]
    if dice.random() < 0.2:
        flags += ["--watch-interval-s", dice.choice(("0.05", "1"))]
    return flags


def _random_flags(
    dice: random.Random, draft: Path | None, *, has_both_roles: bool
) -> tuple[str, ...]:
    flags = [*DRAIN]
    drafting = dice.choice(("none", "model", "model", "text"))
    if drafting == "model" and draft is not None:
        flags += ["--draft", str(draft), *_random_draft_flags(dice)]
    elif drafting == "text":
        flags += ["--draft", "suffix"]
    page_size = dice.choice((16, 64))
    flags += ["--page-size", str(page_size)]
    if dice.random() < 0.3:  # so that requests are preempted
        flags += ["--num-pages", str(1024 // page_size), "--max-running", "6"]
    if not has_both_roles and dice.random() < 0.3:
        flags += ["--local-rest-tokens", "64"]
    for chance, words in SOMETIMES:
        if dice.random() < chance:
            flags += words
    return tuple(flags)


def _random_draft_flags(dice: random.Random) -> list[str]:
    flags = []
    if dice.random() < 0.4:
        flags += ["--spec-topk", "2", "--spec-draft-tokens", "6"]
    for name in ("prompt", "suffix", "adaptive"):
        if dice.random() < 0.2:
            flags += [f"--no-spec-{name}"]
    return flags
