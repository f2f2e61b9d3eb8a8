"""Pictures of dashboards: each panel's queries over an interval, drawn by matplotlib.

They have the layout of the dashboard and show the results of the queries. Grafana's appearance
differs; the caption states this.
"""

import math
import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.panels.catalogue import WIDTH
from tools.panels.queries import Dashboard, Panel
from tools.prometheus import Prometheus

CAPTION = "Drawn from the dashboard's queries by tools/pictures.py, not by Grafana."
PER_ROW = 24 // WIDTH
_UNITS = {
    "s": "seconds",
    "percentunit": "share",
    "Bps": "bytes/s",
    "bytes": "bytes",
    "reqps": "requests/s",
    "cps": "per second",
    "ops": "per second",
    "short": "",
}


def plain(expr: str, rate_interval: str) -> str:
    """Return a query with Grafana's variables replaced: any namespace, this interval."""
    return expr.replace("$__rate_interval", rate_interval).replace("$namespace", ".*")


async def draw(
    server: Prometheus,
    spec: Dashboard,
    path: Path,
    *,
    start_s: float,
    end_s: float,
    rate_interval: str,
) -> None:
    """Write one dashboard as a PNG. Times are seconds since the epoch."""
    num_rows = math.ceil(len(spec.panels) / PER_ROW)
    figure = Figure(figsize=(16, 3.4 * num_rows + 0.8), dpi=70, layout="constrained")
    figure.suptitle(f"{spec.title}: {spec.text}")
    figure.supxlabel(f"seconds; {CAPTION}", fontsize=9)
    grid = figure.subplots(num_rows, PER_ROW, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(spec.panels):
            axes.set_axis_off()
            continue
        await _draw_panel(server, spec.panels[index], axes, start_s, end_s, rate_interval)
    figure.savefig(path)


async def _draw_panel(
    server: Prometheus, panel: Panel, axes: Axes, start_s: float, end_s: float, rate_interval: str
) -> None:
    axes.set_title(panel.title, fontsize=10)
    axes.set_ylabel(_UNITS[panel.unit], fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, alpha=0.3)
    for query in panel.queries:
        series = await server.query_range(
            plain(query.expr, rate_interval), start_s, end_s, step_s=0.5
        )
        for line in series:
            points = [
                (float(at) - start_s, float(value))
                for at, value in line["values"]
                if value != "NaN"
            ]
            axes.plot(
                [at for at, _ in points],
                [value for _, value in points],
                linewidth=1,
                label=_legend(query.legend, line["metric"]),
            )
    axes.set_xlim(0, end_s - start_s)
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend(fontsize=6, loc="upper left")


def _legend(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), text)
