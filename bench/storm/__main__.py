"""`python -m bench.storm`: faults of many kinds in a cluster of two of each role under load.

Two routers, two prefill workers and two decode pools of two stages with drafts run under open-loop
load, or with `--random-layout` pools that the seed draws. A seeded schedule kills and stops
processes, damages bits, fills a disk and shifts clocks; most clients disconnect or misbehave. Every
response is compared with that of a single process. The exit code is 1 if one was wrong, lost or
hung, or anything leaked.
"""

import argparse
import asyncio
import statistics
import sys
from collections import Counter
from pathlib import Path

from baton.cluster_config import demo_model
from bench.report import OtherLoad, Value, render
from bench.storm.layouts import draft_of, random_layout, usual_layout
from bench.storm.lines import LineFile
from bench.storm.schedule import FaultKind, Weather
from bench.storm.storm import Storm, StormConfig, run_storm
from bench.storm.traffic import Manner, Shares
from bench.storm.verdict import Fate, begins_right, difference, fate
from runtime.errors import BatonError

ABORTS = "aborts"
CLIENTS = (ABORTS, "unread", "hostile")
KINDS = (*FaultKind, *CLIENTS)


def figures(storm: Storm) -> dict[str, Value]:
    """Return the figures as one flat object; times in seconds."""
    counts = storm.counts
    recovered = storm.recoveries_s
    by_kind = {
        kind: [
            seconds
            for fault, seconds in zip(storm.faults, recovered, strict=True)
            if fault.kind is kind
        ]
        for kind in FaultKind
    }
    num_patient = sum(counts.fates.values())
    return {
        "requests": counts.num_requests,
        "patient": num_patient,
        **{fate: counts.fates[fate] for fate in Fate if fate not in (Fate.WRONG, Fate.HUNG)},
        "wrong": counts.num_wrong,
        "hung": counts.num_hung,
        "leaked": storm.num_leaked,
        "cached": counts.num_cached,
        "aborted": counts.num_aborted,
        "changed": counts.num_changed,
        "right_share": counts.fates[Fate.RIGHT] / num_patient if num_patient else None,
        "recovery_s": max(recovered, default=0.0),
        "recovery_s_p50": statistics.median(recovered or [0.0]),
        "faults": len(storm.faults),
        **{f"{kind}_faults": len(found) for kind, found in by_kind.items()},
        **{f"{kind}_recovery_s": max(found) for kind, found in by_kind.items() if found},
        "pages_held": storm.held.pages,
        "slots_held": storm.held.slots,
        "sessions_held": storm.held.sessions,
        "requests_held": storm.held.requests,
        "workers_away": storm.held.away,
        "descriptors_grown": storm.num_descriptors,
        "processes_left": storm.num_processes,
        "unhealthy": storm.num_unhealthy,
        "settled_s": storm.settled_s,
        "calm_share": storm.calm_share,
        "untried": ",".join(sorted(storm.untried)),
        "hostile": _spelled(counts.hostile),
    }


def holds(storm: Storm, *, min_right: float) -> bool:
    """Return whether the storm meets the bars that hold for every storm."""
    counts = storm.counts
    possible = sum(counts.fates.values()) - counts.fates[Fate.DAMAGED] - counts.fates[Fate.REPLACED]
    right = counts.fates[Fate.RIGHT] >= min_right * possible
    return (
        not (counts.num_wrong or counts.num_hung or storm.num_leaked or counts.fates[Fate.LOST])
        and right
    )


def explain(storm: Storm) -> list[str]:
    """Yield a line for each fault, and for each request without a right response."""
    lines = [
        f"{fault.at_s:7.2f} s  {fault.kind} {fault.victim} {fault.amount:.1f}: back after {seconds:.2f} s"
        for fault, seconds in zip(storm.faults, storm.recoveries_s, strict=True)
    ]
    for seen in storm.requests:
        truth = storm.truths[seen.coming.question]
        became = fate(seen, truth)
        manner = seen.coming.manner
        if (manner is Manner.PATIENT and became is not Fate.RIGHT) or (
            manner is Manner.ABORTING and not begins_right(seen.events, truth)
        ):
            ended_s = (seen.ended_s or seen.sent_s) - storm.start_s
            lines.append(
                f"{seen.sent_s - storm.start_s:7.2f} s  {became} at {ended_s:.2f} s after "
                f"{seen.num_tokens} tokens of a {manner} client: {seen.error} {seen.text} "
                f"{difference(seen, truth) if became is Fate.WRONG else ''}"
            )
    return lines


def _spelled(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))


def _config(flags: argparse.Namespace, sink: LineFile) -> StormConfig:
    possible = [kind for kind in KINDS if kind is not FaultKind.ADAPTER or flags.adapters]
    kinds = frozenset(possible if flags.faults is None else flags.faults.split(","))
    if unknown := kinds - set(possible) - {""}:
        raise SystemExit(f"--faults: {', '.join(sorted(unknown))} is none of {', '.join(possible)}")
    weather = Weather(
        flags.seconds,
        frozenset(FaultKind(kind) for kind in kinds - set(CLIENTS) - {""}),
        flags.kill_every,
        flags.other_every,
    )
    shares = Shares(
        flags.aborts if ABORTS in kinds else 0.0,
        0.02 if "unread" in kinds else 0.0,
        0.02 if "hostile" in kinds else 0.0,
    )
    draft = flags.draft or draft_of(flags.model)
    layout = (
        random_layout(flags.seed, draft) if flags.random_layout else usual_layout(flags.seed, draft)
    )
    return StormConfig(
        weather,
        flags.seed,
        flags.model,
        layout,
        flags.adapters,
        shares,
        flags.rate,
        flags.timeout,
        sink,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("seconds", 60.0),
        ("rate", 8.0),
        ("kill-every", 10.0),
        ("other-every", 7.0),
        ("aborts", 0.6),
        ("timeout", 30.0),
        ("min-right", 1.0),
    ):
        parser.add_argument(f"--{name}", type=float, default=default, help=f"default {default}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--faults",
        help=f"faults to cause, of {','.join(KINDS)}; default: all, {FaultKind.ADAPTER} with --adapters",
    )
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument(
        "--draft",
        type=Path,
        help="draft model directory; default: the demo model's, if it is served",
    )
    parser.add_argument(
        "--random-layout", action="store_true", help="draw pools, divisions and settings"
    )
    parser.add_argument(
        "--adapters",
        type=Path,
        help="folder of adapters of one form, which are asked for in turn with the model",
    )
    parser.add_argument("--log", type=Path, help="file for the output of all processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    others = OtherLoad()
    config = _config(flags, LineFile(flags.log))
    print(f"layout: {config.layout}", file=sys.stderr)
    try:
        storm = asyncio.run(run_storm(config))
    except BatonError as error:
        print(f"bench.storm: {error}", file=sys.stderr)
        return 1
    print("\n".join(explain(storm)), file=sys.stderr)
    print(render("storm", {**figures(storm), **others.figures()}, as_json=flags.json))
    return 0 if holds(storm, min_right=flags.min_right) else 1


if __name__ == "__main__":
    sys.exit(main())
