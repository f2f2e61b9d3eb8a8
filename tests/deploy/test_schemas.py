"""Every rendered manifest is valid, strictly, and the validation itself notices mistakes."""

from typing import Any

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, OVERLAYS, load, of_kind, pod_kinds
from tests.deploy.schemas import NEWEST, OLDEST, problems


@pytest.mark.parametrize("release", [OLDEST, NEWEST])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_fits_its_schema(overlay: str, release: str) -> None:
    documents = load(overlay)
    found = {f"{d['kind']}/{d['metadata']['name']}": problems(d, release) for d in documents}
    assert {name: text for name, text in found.items() if text} == {}
    kinds = {d["kind"] for d in documents}
    assert kinds >= {"Deployment", "Role", "NetworkPolicy"}
    assert kinds & {"LeaderWorkerSet", "DisaggregatedSet"} or overlay == "aggregated"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_inside_custom_resources_fit_the_core_schema(overlay: str) -> None:
    for pod in pod_kinds(load(overlay)):
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod.name},
            "spec": pod.spec,
        }
        assert problems(manifest) == [], pod.name


def test_rendered_and_written_overlays_are_the_same_set() -> None:
    assert sorted(path.stem for path in (DEPLOY / "rendered").glob("*.yaml")) == OVERLAYS


def _edited(kind: str, path: str, value: object) -> dict[str, Any]:
    document = of_kind(load("rdma"), kind)[0]
    *parents, last = path.split(".")
    node = document
    for key in parents:
        node = node[key]
    node[last] = value
    return document


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("LeaderWorkerSet", "spec.leaderWorkerTemplate.szie", 2, "szie"),
        ("LeaderWorkerSet", "spec.leaderWorkerTemplate.restartPolicy", "Never", "Never"),
        (
            "LeaderWorkerSet",
            "spec.leaderWorkerTemplate.workerTemplate.spec.imagePullPolice",
            "Always",
            "imagePullPolice",
        ),
        ("ScaledObject", "spec.minReplicas", 2, "minReplicas"),
        ("ScaledObject", "spec.triggers", [{"type": "cpu", "metadata": {"value": 70}}], "70"),
        ("PodMonitor", "spec.podMetricEndpoints", [], "podMetricEndpoints"),
        ("PrometheusRule", "spec.groups", [{"name": "x", "rule": []}], "rule"),
        ("Deployment", "spec.replicas", "two", "two"),
        ("NetworkPolicy", "spec.policyType", ["Ingress"], "policyType"),
        ("Service", "kind", "Servise", "servise"),
    ],
)
def test_mistakes_are_noticed(kind: str, path: str, value: object, said: str) -> None:
    assert said in " ".join(problems(_edited(kind, path, value))).replace("Servise", "servise")


def test_rules_of_a_definition_are_applied() -> None:
    """A set whose prefill is scaled to nothing and whose decode is not: CEL, not the schema,
    forbids it."""
    (document,) = of_kind(load("disaggregated"), "DisaggregatedSet")
    assert problems(document) == []
    document["spec"]["roles"][0]["spec"]["replicas"] = 0
    assert problems(document)[0].startswith("$.spec: ")
    document["spec"]["roles"][0]["spec"]["replicas"] = "none"
    assert "none" in problems(document)[0]


def test_a_disaggregated_sets_pods_are_those_of_the_plain_kinds() -> None:
    """All but their resources, which are the overlays' own."""
    plain, together = (
        {pod.name: pod for pod in pod_kinds(load(overlay))}
        for overlay in ("single-node", "disaggregated")
    )
    assert plain.keys() == together.keys()
    for name, pod in plain.items():
        for key in (
            "env",
            "ports",
            "readinessProbe",
            "lifecycle",
            "securityContext",
            "volumeMounts",
        ):
            assert pod.container.get(key) == together[name].container.get(key), f"{name}: {key}"


def test_the_operators_rules_are_the_plain_ones() -> None:
    plain = yaml.safe_load((DEPLOY / "alerts" / "rules.yaml").read_text())
    (wrapped,) = of_kind(load("single-node"), "PrometheusRule")
    assert wrapped["spec"]["groups"] == plain["groups"], "run make manifests"
