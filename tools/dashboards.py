"""Writer of Grafana's JSON of all dashboards.

Run `python -m tools.dashboards` after a change of `tools.panels`.
"""

from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from tools.panels.catalogue import DASHBOARDS, WIDTH
from tools.panels.queries import Dashboard, Panel

FOLDER = Path(__file__).parent.parent / "deploy" / "dashboards"
HEIGHT = 8
COLUMNS = 24
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def build_json(spec: Dashboard) -> str:
    """Return the JSON of one dashboard for an import into Grafana."""
    builder = (
        dashboard.Dashboard(spec.title)
        .uid(spec.uid)
        .description(spec.text)
        .tags(["baton"])
        .editable()
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").type("prometheus").label("Prometheus")
        )
        .with_variable(_namespaces())
        .link(
            dashboard.DashboardLink("Baton")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["baton"])
            .as_dropdown(True)  # noqa: FBT003
            .include_vars(True)  # noqa: FBT003
            .keep_time(True)  # noqa: FBT003
        )
    )
    for index, panel in enumerate(spec.panels):
        builder = builder.with_panel(_panel(panel, index))
    return JSONEncoder(indent=2, sort_keys=True).encode(builder.build()) + "\n"


def _namespaces() -> dashboard.QueryVariable:
    """Return the variable of the namespace; an empty choice matches series without one, too."""
    return (
        dashboard.QueryVariable("namespace")
        .label("Namespace")
        .datasource(_SOURCE)
        .query("label_values(baton_build_info, namespace)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)  # noqa: FBT003
        .all_value(".*")
        .multi(True)  # noqa: FBT003
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(spec: Panel, index: int) -> timeseries.Panel:
    per_row = COLUMNS // WIDTH
    panel = (
        timeseries.Panel()
        .id(index + 1)
        .title(spec.title)
        .description(spec.text)
        .unit(spec.unit)
        .min(0)
        .datasource(_SOURCE)
        .show_points(common_models.VisibilityMode.NEVER)
        .fill_opacity(10)
        .grid_pos(
            models.GridPos(
                x=index % per_row * WIDTH, y=index // per_row * HEIGHT, w=WIDTH, h=HEIGHT
            )
        )
        .legend(
            common.VizLegendOptions()
            .show_legend(True)  # noqa: FBT003
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
    )
    for letter, query in zip("ABCDEF", spec.queries, strict=False):
        panel = panel.with_target(
            prometheus.Dataquery()
            .ref_id(letter)
            .expr(query.expr)
            .range()
            .legend_format(query.legend)
        )
    return panel


def main() -> None:
    for spec in DASHBOARDS:
        (FOLDER / f"{spec.uid}.json").write_text(build_json(spec))


if __name__ == "__main__":
    main()
