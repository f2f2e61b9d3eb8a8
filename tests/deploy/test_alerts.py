"""Rules use metrics and labels that the code has, and promtool's tests hold for every alert."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from runtime.observe.catalogue import families
from tests.deploy.manifests import DEPLOY, load, of_kind

ALERTS = DEPLOY / "alerts"

RUNBOOKS = "https://baton.example.org/docs/runbooks.md"


def _exported() -> dict[str, set[str]]:
    """Return the labels of each series, over all roles."""
    return {
        series: {*family.labels, *(("le",) if series.endswith("_bucket") else ())}
        for family in families()
        for series in family.series
    }


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ALERTS / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _alerts() -> list[str]:
    return [rule["alert"] for rule in _rules() if "alert" in rule]


def test_rules_use_metrics_and_labels_that_exist() -> None:
    exported, recorded = _exported(), {rule["record"] for rule in _rules() if "record" in rule}
    for rule in _rules():
        names = re.findall(r"(?<![\w:])((?:\w+:)?baton[\w:]*)(?:\{([^}]*)\})?", rule["expr"])
        assert names
        for name, matchers in names:
            assert name in exported or name in recorded, rule
            used = set(re.findall(r"(\w+)\s*[=!]", matchers))
            assert used <= exported.get(name, set()), rule


def test_autoscalers_use_metrics_that_exist() -> None:
    queries = [
        trigger["metadata"]["query"]
        for document in of_kind(load("rdma"), "ScaledObject")
        for trigger in document["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    exported = _exported()
    for query in queries:
        ((name, matchers),) = re.findall(r"(baton\w*)\{([^}]*)\}", query)
        assert set(re.findall(r"(\w+)=", matchers)) - {"namespace"} <= exported[name]
    assert len(queries) == 2


def test_label_values_in_rules_are_those_of_the_code() -> None:
    text = (ALERTS / "rules.yaml").read_text()
    assert set(re.findall(r'state="(\w+)"', text)) == {"usable"}
    assert set(re.findall(r'outcome="(\w+)"', text)) == {"failed", "fewer"}
    assert set(re.findall(r'result="(\w+)"', text)) == {"failed"}
    root = DEPLOY.parent
    flow, directory, notes, adapters = (
        (root / name).read_text()
        for name in (
            "router/request/flow.py",
            "router/workers/directory.py",
            "router/request/notes.py",
            "pool/request/adapter_memory.py",
        )
    )
    assert '.ended("failed")' in flow
    assert '"usable"' in directory
    assert '"fewer"' in notes
    assert '.loads.labels("failed")' in adapters


def test_every_alert_fires_and_clears_in_a_test() -> None:
    cases = [
        case
        for test in yaml.safe_load((ALERTS / "rules_test.yaml").read_text())["tests"]
        for case in test.get("alert_rule_test", [])
    ]
    for alert in _alerts():
        fired = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == alert]
        assert fired == [False, True, False], f"{alert}: quiet, firing, quiet again"


def test_every_alert_has_an_entry_in_the_runbook() -> None:
    """In the order of the rules, each with what to do, and the alert says where it is."""
    page = (DEPLOY.parent / "docs" / "runbooks.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == _alerts()
    for rule in (rule for rule in _rules() if "alert" in rule):
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}#{rule['alert'].lower()}"
        entry = page.split(f"## {rule['alert']}\n")[1].split("\n## ")[0]
        assert re.search(r"^1\. ", entry, re.MULTILINE), f"{rule['alert']}: what to do first"


def test_runbooks_name_metrics_that_exist() -> None:
    page = (DEPLOY.parent / "docs" / "runbooks.md").read_text()
    exported = {family.name.removesuffix("_total") for family in families()}
    assert {name.removesuffix("_total") for name in re.findall(r"`(baton_\w+)`", page)} <= exported


@pytest.mark.parametrize(
    "command", [("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml")]
)
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, (
        "promtool is needed to test the alert rules: install Prometheus (Debian: prometheus)"
    )
    done = subprocess.run(
        [promtool, *command], cwd=ALERTS, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
