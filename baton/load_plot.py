"""Plot of a load run: latencies over time, their distributions, and running requests.

Needs matplotlib (extra `plot`).
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.load import Outcome, Slo
from runtime.errors import ConfigError

if TYPE_CHECKING:  # imported when used, because it is optional
    from matplotlib.axes import Axes


def check_can_plot(path: Path) -> None:
    """Raise ConfigError if the plot cannot be written; called before the run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'baton[plot]'", field="plot")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot must be a .png, .svg or .pdf file, got {path}", field="plot")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot: no such folder: {path.absolute().parent}", field="plot")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"--plot: cannot write {path}", field="plot")


def plot(outcomes: Sequence[Outcome], slo: Slo, path: Path) -> None:
    """Write the plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), dpi=90, layout="constrained")
    over_time, under_way, ttft, tpot = figure.subplots(2, 2).flat
    _over_time(over_time, outcomes, slo)
    _under_way(under_way, outcomes)
    _distribution(
        ttft,
        [o.ttft_s for o in outcomes if o.ttft_s is not None],
        "time to first token",
        slo.ttft_s,
    )
    _distribution(
        tpot,
        [o.tpot_s for o in outcomes if o.tpot_s is not None],
        "time per output token",
        slo.tpot_s,
    )
    figure.savefig(path)


def _over_time(axes: "Axes", outcomes: Sequence[Outcome], slo: Slo) -> None:
    done = [(o.arrived_s, o.ttft_s) for o in outcomes if o.ttft_s is not None]
    failed = [o.arrived_s for o in outcomes if o.error is not None]
    axes.plot([at for at, _ in done], [ttft for _, ttft in done], ".", label="first token")
    axes.plot(failed, [0.0] * len(failed), "x", color="red", label="failed")
    axes.axhline(slo.ttft_s, linestyle="--", color="grey", label="limit")
    axes.set(
        title="Time to first token, by arrival",
        xlabel="s after the start",
        ylabel="s",
        ylim=(0, None),
    )
    axes.legend()


def _under_way(axes: "Axes", outcomes: Sequence[Outcome]) -> None:
    changes = sorted(
        [(o.arrived_s + o.lag_s, 1) for o in outcomes] + [(o.ended_s, -1) for o in outcomes]
    )
    level = 0
    levels = []
    for _, change in changes:
        level += change
        levels.append(level)
    axes.step([at for at, _ in changes], levels, where="post")
    axes.set(title="Running requests", xlabel="s after the start", ylim=(0, None))


def _distribution(axes: "Axes", samples: Sequence[float], title: str, limit_s: float) -> None:
    ordered = sorted(samples)
    axes.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))])
    axes.axvline(limit_s, linestyle="--", color="grey")
    axes.set(title=f"Share of requests within {title}", xlabel="s", ylim=(0, 1), xlim=(0, None))
    axes.grid(visible=True, alpha=0.3)
