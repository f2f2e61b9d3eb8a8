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
    assert {d["kind"] for d in documents} >= {"Deployment", "StatefulSet", "LeaderWorkerSet", "NetworkPolicy"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_inside_custom_resources_fit_the_core_schema(overlay: str) -> None:
    for pod in pod_kinds(load(overlay)):
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod.name}, "spec": pod.spec}
        assert problems(manifest) == [], pod.name


def test_rendered_and_written_overlays_are_the_same_set() -> None:
    assert sorted(path.stem for path in (DEPLOY / "rendered").glob("*.yaml")) == OVERLAYS


def _edited(kind: str, path: str, value: object) -> dict[str, Any]:
    document = of_kind(load("single-node"), kind)[0]
    *parents, last = path.split(".")
    node = document
    for key in parents:
        node = node[key]
    node[last] = value
    return document


@pytest.mark.parametrize(("kind", "path", "value", "said"), [
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.szie", 2, "szie"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.restartPolicy", "Never", "Never"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.workerTemplate.spec.imagePullPolice", "Always", "imagePullPolice"),
    ("PodMonitor", "spec.podMetricEndpoints", [], "podMetricEndpoints"),
    ("PrometheusRule", "spec.groups", [{"name": "x", "rule": []}], "rule"),
    ("Deployment", "spec.replicas", "two", "two"),
    ("NetworkPolicy", "spec.policyType", ["Ingress"], "policyType"),
    ("Service", "kind", "Servise", "servise"),
])
def test_mistakes_are_noticed(kind: str, path: str, value: object, said: str) -> None:
    assert said in " ".join(problems(_edited(kind, path, value))).replace("Servise", "servise")


def test_the_operators_rules_are_the_plain_ones() -> None:
    plain = yaml.safe_load((DEPLOY / "alerts" / "rules.yaml").read_text())
    (wrapped,) = of_kind(load("single-node"), "PrometheusRule")
    assert wrapped["spec"]["groups"] == plain["groups"], "run make manifests"
