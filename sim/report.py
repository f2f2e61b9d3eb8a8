"""Results of a simulation: figures, a table, and a plot."""

from collections.abc import Sequence
from pathlib import Path

from baton.load import Slo, errors_of, percentiles, summarize
from sim.fleet import FleetConfig, FleetRun

_LEFT_OUT = ("itl_s", "prefill_s", "handoff_exposed_s", "lag_s")  # not measured by a simulation
_SOURCES = ("host", "disk", "pulled")  # of cached tokens that were not in memory
_ROWS = {
    "time to first token": "ttft_s",
    "time per output token": "tpot_s",
    "whole request": "e2e_s",
}


def figures_of(run: FleetRun, config: FleetConfig, slo: Slo) -> dict[str, object]:
    """Return the figures of a run.

    They are those of `baton load` that a simulation has, under the same names, and some that only a
    simulation can show. Figures that begin with `machine_` describe the simulating machine; all
    others are equal in every run.
    """
    seen = {
        name: value
        for name, value in summarize(run.outcomes, slo, run.duration_s).items()
        if not name.startswith(_LEFT_OUT)
    }
    prompt_tokens = sum(each.prompt_tokens for each in run.answered)
    last = run.samples[-1]
    return {
        **seen,
        "errors": errors_of(run.outcomes),
        "prefill_workers": config.num_prefill,
        "decode_workers": config.num_decode,
        "workers_of_both_roles": config.num_both,
        "routers": config.num_routers,
        "policy": config.router.policy.value,
        "prefill_busy": last.prefill_busy_s / config.num_with_prefill / max(last.at_s, 1e-9),
        "decode_busy": last.decode_busy_s / config.num_with_decode / max(last.at_s, 1e-9),
        "pages_used_p90": percentiles([sample.pages_used for sample in run.samples], "pages")[
            "pages_p90"
        ],
        "waiting_max": max(sample.waiting for sample in run.samples),
        "cached_share": sum(each.cached_tokens for each in run.answered) / max(prompt_tokens, 1),
        **{
            f"{source}_share": sum(each.brought_tokens.get(source, 0) for each in run.answered)
            / max(prompt_tokens, 1)
            for source in _SOURCES
        },
        "preemptions": run.num_preemptions,
        "role_switches": len(run.switches),
        "moved_bytes": round(run.moved_bytes),
        "choices": run.num_picks,
        "machine_pick_s": run.pick_s,
        "machine_wall_s": run.wall_s,
        "machine_speed": run.duration_s / max(run.wall_s, 1e-9),
    }


def lines_of(figures: dict[str, object]) -> list[str]:
    """Return the figures as lines of text."""
    rows = [
        f"{'milliseconds':<24}" + "".join(f"{part:>10}" for part in ("p50", "p90", "p99", "mean"))
    ]
    for text, name in _ROWS.items():
        values = [figures[f"{name}_{part}"] for part in ("p50", "p90", "p99", "mean")]
        cells = ("-" if not isinstance(value, float) else f"{value * 1e3:.1f}" for value in values)
        rows.append(f"{text:<24}" + "".join(f"{cell:>10}" for cell in cells))
    return [
        *rows,
        "{requests} requests in {duration_s:.0f} s, {failed} failed: {requests_per_s:.2f} a second, "
        "{output_tokens_per_s:.0f} tokens a second".format_map(figures),
        "goodput {goodput_per_s:.2f} a second: {slo_attainment:.1%} met TTFT <= {slo_ttft_s:g} s and "
        "TPOT <= {slo_tpot_s:g} s".format_map(figures),
        "busy: prefill {prefill_busy:.0%}, decode {decode_busy:.0%}; pages of decode pools {pages_used_p90:.0%} at "
        "p90, {preemptions} preemptions".format_map(figures),
        "prefix caches served {cached_share:.1%} of all prompt tokens; at most {waiting_max} requests "
        "waited".format_map(figures),
        *(
            [
                "of all prompt tokens {host_share:.1%} came from host memory, {disk_share:.1%} from disk, "
                "{pulled_share:.1%} from other workers".format_map(figures)
            ]
            if any(figures[f"{source}_share"] for source in _SOURCES)
            else []
        ),
        *(
            ["roles were switched {role_switches} times".format_map(figures)]
            if figures["role_switches"]
            else []
        ),
        *([f"errors: {figures['errors']}"] if figures["errors"] else []),
        "simulated in {machine_wall_s:.1f} s, {machine_speed:.0f} times real time; a router's choice "
        "took {choice_us:.0f} us on this machine".format_map(
            {**figures, "choice_us": 1e6 * float(str(figures["machine_pick_s"]))}
        ),
    ]


def draw(run: FleetRun, config: FleetConfig, slo: Slo, path: Path) -> None:
    """Plot first tokens, queues, memory and utilization over time. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), dpi=90, layout="constrained")
    first, queues, memory, busy = figure.subplots(2, 2).flat
    at = [sample.at_s for sample in run.samples]
    done = [(each.arrived_s, each.ttft_s) for each in run.outcomes if each.ttft_s is not None]
    first.plot([at_s for at_s, _ in done], [ttft for _, ttft in done], ".", markersize=2)
    first.axhline(slo.ttft_s, linestyle="--", color="grey")
    first.set(title="Time to first token, by arrival", ylabel="s", ylim=(0, None))
    queues.plot(at, [sample.waiting for sample in run.samples], label="requests waiting in routers")
    queues.plot(
        at,
        [sample.queued_tokens / 1000 for sample in run.samples],
        label="1000 tokens in prefill workers",
    )
    queues.set(title="Queues", ylim=(0, None))
    queues.legend()
    memory.plot(at, [100 * sample.pages_used for sample in run.samples])
    memory.set(title="Pages of decode pools in use", ylabel="%", ylim=(0, 100))
    for label, count, seconds in (
        ("prefill", config.num_with_prefill, [each.prefill_busy_s for each in run.samples]),
        ("decode", config.num_with_decode, [each.decode_busy_s for each in run.samples]),
    ):
        busy.plot(at[1:], _shares(at, seconds, count), label=label)
    busy.set(title="Workers busy", ylabel="%", ylim=(0, 105))
    busy.legend()
    for axes in (first, queues, memory, busy):
        axes.set_xlabel("s")
    figure.savefig(path)


def _shares(at: Sequence[float], seconds: Sequence[float], count: int) -> list[float]:
    """Return the utilization of `count` workers between each two samples, in per cent.

    Work counts at its end, so that values may exceed 100.
    """
    return [
        100 * (after - before) / count / (later - sooner)
        for sooner, later, before, after in zip(at, at[1:], seconds, seconds[1:], strict=False)
    ]
