"""The Helm chart renders what kustomize renders, and rejects values that it does not know."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.manifests import DEPLOY, OVERLAYS, Document, load, of_kind
from tests.deploy.schemas import problems

CHART = DEPLOY / "chart"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
CONFIG, CHECKSUM = "baton-config", "checksum/config"


pytestmark = pytest.mark.skipif(
    HELM is None, reason="needs helm, which the package index has for Linux on x86-64 only"
)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HELM), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def rendered(*arguments: str) -> list[Document]:
    done = helm("template", "baton", str(CHART), "--namespace", "baton", *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def refusal(*arguments: str) -> str:
    done = helm("template", "baton", str(CHART), *arguments)
    assert done.returncode != 0
    return done.stderr


def by_name(documents: list[Document]) -> dict[str, Document]:
    every = [comparable(each) for each in documents]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in every}


def comparable(value: Any) -> Any:  # noqa: ANN401
    """Return the object without what only one of them has.

    kustomize ends the ConfigMap's name with its checksum; pods of the chart carry one.
    """
    if isinstance(value, dict):
        return {
            key: comparable(part)
            for key, part in value.items()
            if not (key == "annotations" and set(part) <= {CHECKSUM})
        }
    if isinstance(value, list):
        return [comparable(part) for part in value]
    return CONFIG if isinstance(value, str) and value.startswith(f"{CONFIG}-") else value


def is_of_server(document: Document) -> bool:
    """Return whether this is an object of an example's cache server, which is the user's."""
    return (
        document["kind"] in {"Deployment", "Service"}
        and document["metadata"]["name"] == "cache-server"
    )


def check_rendered(documents: list[Document], *values: str) -> None:
    """Compare the objects with those that the chart renders with these files of values."""
    kinds = {"Namespace", "PersistentVolumeClaim"}
    expected = by_name(
        [each for each in documents if each["kind"] not in kinds and not is_of_server(each)]
    )
    found = by_name(rendered(*(f"--values={CHART}/values/{name}.yaml" for name in values)))
    assert found.keys() == expected.keys()
    for name, document in expected.items():
        assert found[name] == document, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_overlay_has_values_that_render_the_same_objects(overlay: str) -> None:
    """All but the namespace, which Helm leaves to its user."""
    check_rendered(load(overlay), overlay)


@pytest.mark.parametrize(
    ("overlay", "example"),
    [
        ("laptop", "kept-kernels"),
        ("laptop", "disk-cache"),
        ("laptop", "cache-server"),
        ("laptop", "adapters"),
        ("disaggregated", "scaled-set"),
    ],
)
def test_examples_of_one_model_are_values_after_those_of_an_overlay(
    overlay: str, example: str
) -> None:
    """Claims and servers are the user's."""
    text = (DEPLOY / "rendered" / "examples" / f"{example}.yaml").read_text()
    check_rendered(list(yaml.safe_load_all(text)), overlay, example)


@pytest.mark.parametrize(
    "given",
    [
        {"nccl": {"enabled": True}, "tracing": {"endpoint": "http://collector.tracing:4317"}},
        {
            "image": {"pullPolicy": "Always"},
            "imagePullSecrets": [{"name": "registry"}],
            "prefill": {
                "nodeSelector": {"pool": "large"},
                "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                "podAnnotations": {"team": "serving"},
                "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            },
            "networkPolicies": {"enabled": False},
        },
    ],
    ids=["components", "pod settings"],
)
def test_other_values_render_valid_objects(tmp_path: Path, given: dict[str, Any]) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(given))
    documents = rendered("--values", str(values))
    assert {str(each): problems(each) for each in documents if problems(each)} == {}
    (prefill,) = (
        each for each in of_kind(documents, "Deployment") if each["metadata"]["name"] == "prefill"
    )
    pod = prefill["spec"]["template"]
    for key, value in given.get("prefill", {}).items():
        if key == "podAnnotations":
            assert value.items() <= pod["metadata"]["annotations"].items()
        elif key == "env":
            assert pod["spec"]["containers"][0]["env"] == value
        else:
            assert pod["spec"][key] == value


def test_a_change_of_the_settings_rolls_every_pod_that_reads_them() -> None:
    def pods(*arguments: str) -> dict[str, Any]:
        documents = of_kind(rendered("--set", "gateway.enabled=true", *arguments), "Deployment")
        return {each["metadata"]["name"]: each["spec"]["template"] for each in documents}

    before, after = pods(), pods("--set-string", "config=[router]\nlisten = '0.0.0.0:7000'")
    assert before["router"] != after["router"]
    assert before["prefill"] != after["prefill"]
    assert before["gateway"] == after["gateway"]  # it has no baton.toml


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "decode.stages=2"], "stages"),
        (["--set", "layout=mixed"], "layout"),
        (["--set", "prefill.replicas=-1"], "replicas"),
        (["--set", "model.path=models"], "path"),
        (["--set", "gateway.enabled=true", "--set", "tls.enabled=true"], "excludes tls.enabled"),
        (["--set", "keda.enabled=true"], "needs planner.enabled"),
        (["--kube-version", "1.29.0"], "1.30"),
    ],
)
def test_values_that_cannot_work_are_refused(arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


def test_the_schema_lists_every_value_and_nothing_else() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)

    def check(given: object, part: dict[str, Any], name: str) -> None:
        listed = part.get("properties")
        if listed is None or not isinstance(given, dict):
            return
        assert given.keys() == listed.keys() - {"global"}, name
        for key, value in given.items():
            check(value, listed[key], f"{name}.{key}")

    check(values, schema, "values")


def test_the_chart_has_the_version_of_the_product() -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (project["version"], project["version"])


def test_helm_finds_nothing_to_object_to() -> None:
    done = helm("lint", str(CHART), "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_charts_files_are_those_of_the_manifests() -> None:
    """`make manifests` copies them; the chart may read only what is inside it."""
    for own, original in (("baton.toml", "base/baton.toml"), ("rules.yaml", "alerts/rules.yaml")):
        assert (CHART / "files" / own).read_text() == (DEPLOY / original).read_text()
