"""Metric names are frozen: dashboards and alerts of people we do not know depend on them."""

from typing import Any

import yaml

from runtime.observe.catalogue import families
from tests.deploy.manifests import DEPLOY


def _contract() -> dict[str, dict[str, Any]]:
    contract: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "metrics.yaml").read_text())[
        "families"
    ]
    return contract


def test_exported_metrics_equal_the_contract() -> None:
    exported = {
        family.name: {
            "type": family.kind,
            "labels": list(family.labels),
            "unit": family.unit,
            "roles": list(family.roles),
        }
        for family in families()
    }
    assert exported == _contract(), (
        "names, types, labels and units are fixed; a new family is added to the contract"
    )


def test_names_follow_the_rules_of_prometheus() -> None:
    """Base units in the suffix, _total for counters, no type in the name."""
    for name, family in _contract().items():
        assert name.endswith("_total") == (family["type"] == "counter"), name
        assert name.endswith("_info") == (family["type"] == "info"), name
        assert not set(name.split("_")) & {
            "ms",
            "us",
            "mb",
            "gb",
            "percent",
            "gauge",
            "histogram",
            "counter",
        }, name
        if family["unit"] in ("seconds", "bytes", "ratio"):
            assert name.removesuffix("_total").endswith("_" + family["unit"]), name
