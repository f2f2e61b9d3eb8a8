"""Layouts of a storm's cluster: the usual one, or one that a seed draws."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    drawing = _Drawing(random.Random(seed), has_adapters=has_adapters)
    drawing.pools()
    drawing.flags(draft)
    return StormLayout(
        drawing.fields,
        tuple(drawing.worker_flags),
        (*DRAIN, *PULLS, "--policy", drawing.dice.choice(("prefix_cache", "round_robin"))),
        has_disk=not drawing.has_data_ranks and drawing.dice.random() < 0.4,
    )


@dataclass
class _Drawing:
    dice: random.Random
    has_adapters: bool
    fields: dict[str, int] = field(default_factory=dict)
    worker_flags: list[str] = field(default_factory=lambda: list(DRAIN))

    def pools(self) -> None:
        kind = self.dice.choice(("apart", "apart", "both roles", "mixed"))
        roles = {"apart": ("prefill", "decode"), "both roles": ("worker",)}.get(
            kind, ("prefill", "decode", "worker")
        )
        count = {"apart": 2, "both roles": 3}.get(kind, 1)
        self.fields = {"prefill": 0, "decode": 0} | dict.fromkeys(roles, count)
        for role in roles:
            stages, ranks = self.dice.choice(DIVISIONS)
            self.fields |= {f"{role}_pp": stages, f"{role}_tp": ranks}
            if ranks > 1 and not self.has_adapters and self.dice.random() < 0.4:
                self.fields[f"{role}_dp_attention"] = ranks

    @property
    def has_data_ranks(self) -> bool:
        return any(name.endswith("dp_attention") for name in self.fields)

    def flags(self, draft: Path | None) -> None:
        drafting = self.dice.choice(("none", "model", "model", "text"))
        if drafting == "model" and draft is not None:
            self.worker_flags += ["--draft", str(draft)]
        elif drafting == "text":
            self.worker_flags += ["--draft", "suffix"]
        if self.dice.random() < 0.3:  # so that requests are preempted
            self.worker_flags += ["--num-pages", "16", "--max-running", "6"]
        if self.dice.random() < 0.3:
            self.worker_flags += ["--chunk-tokens", "64"]
