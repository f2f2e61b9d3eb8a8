"""Dashboards are what their code gives, fit on Grafana's grid, and ask only for what Baton
exports."""

import json
import re
from itertools import combinations
from typing import Any

import promql_parser
import pytest
import yaml

from runtime.observe.catalogue import families
from tests.deploy.manifests import DEPLOY
from tools.dashboards import COLUMNS, FOLDER, build_json
from tools.panels.catalogue import DASHBOARDS
from tools.panels.queries import Dashboard, Panel

SERIES = {
    series: {*family.labels, *(("le",) if series.endswith("_bucket") else ())}
    for family in families()
    for series in family.series
}
FROM_THE_SCRAPE = {"namespace", "job", "instance"}


def load(spec: Dashboard) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{spec.uid}.json").read_text())
    return loaded


def selectors(node: object) -> list[Any]:
    """Yield every metric selector of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    inner = [
        getattr(node, name)
        for name in ("expr", "lhs", "rhs", "vector_selector")
        if name in dir(node)
    ]
    arguments = list(node.args) if isinstance(node, promql_parser.Call) else []
    return [found for child in (*inner, *arguments) for found in selectors(child)]


@pytest.mark.parametrize("spec", DASHBOARDS, ids=lambda spec: spec.uid)
def test_the_committed_json_is_up_to_date(spec: Dashboard) -> None:
    assert (FOLDER / f"{spec.uid}.json").read_text() == build_json(spec), (
        "run python -m tools.dashboards"
    )


def test_the_sidecar_gets_every_dashboard() -> None:
    (generator,) = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["configMapGenerator"]
    assert generator["files"] == [f"{spec.uid}.json" for spec in DASHBOARDS]
    assert {path.name for path in FOLDER.glob("*.json")} == set(generator["files"])
    assert DEPLOY in FOLDER.parents


@pytest.mark.parametrize("spec", DASHBOARDS, ids=lambda spec: spec.uid)
def test_grafana_can_show_it(spec: Dashboard) -> None:
    dashboard = load(spec)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len(spec.panels)
    assert dashboard["uid"] == spec.uid
    kinds = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert kinds == {"datasource": "datasource", "namespace": "query"}
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= COLUMNS
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids) > 0
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, f"{one} and {other} overlap"


@pytest.mark.parametrize(
    ("spec", "panel"),
    [(spec, panel) for spec in DASHBOARDS for panel in spec.panels],
    ids=lambda value: value.uid if isinstance(value, Dashboard) else value.title,
)
def test_queries_parse_and_use_exported_metrics(spec: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        expr = query.expr.replace("$__rate_interval", "1m")
        found = selectors(promql_parser.parse(expr))
        assert {selector.name for selector in found} == set(re.findall(r"\b(baton_\w+)\{", expr)), (
            expr
        )
        for selector in found:
            assert selector.name in SERIES, f"{selector.name} is not exported"
            used = {matcher.name for matcher in selector.matchers.matchers} - FROM_THE_SCRAPE
            assert used <= SERIES[selector.name], selector.name
        known = FROM_THE_SCRAPE.union(*(SERIES[selector.name] for selector in found))
        grouped = set(re.findall(r"\w+", ",".join(re.findall(r"by \(([^)]*)\)", expr))))
        assert grouped | set(re.findall(r"{{(\w+)}}", query.legend)) <= known, expr
