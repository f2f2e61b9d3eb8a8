"""The rendered manifests as tests read them: documents, and the pods they make with the labels
these will carry."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "overlays").iterdir())
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"

Document = dict[str, Any]


@dataclass(frozen=True)
class PodKind:
    """One kind of pod of an overlay. `index` is its place in a LeaderWorkerSet's group."""

    name: str
    role: str
    spec: Document
    labels: Mapping[str, str]
    index: int = 0
    group_size: int = 1

    @property
    def container(self) -> Document:
        (container,) = self.spec["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def environment(self) -> dict[str, str]:
        """Expand the environment as the kubelet does, after the variables of the LeaderWorkerSet
        controller."""
        injected = {
            "LWS_LEADER_ADDRESS": "decode-0.decode.baton",
            "LWS_GROUP_SIZE": str(self.group_size),
            "LWS_WORKER_INDEX": str(self.index),
        }
        values: dict[str, str] = {}
        for item in self.container.get("env", []):
            text = item["value"]
            for name, value in injected.items():
                text = text.replace(f"$({name})", value)
            values[item["name"]] = text
        return values

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the process, with variables expanded as the kubelet does."""
        expanded = []
        for argument in self.container["args"]:
            for name, value in self.environment.items():
                argument = argument.replace(f"$({name})", value)
            expanded.append(argument)
        return expanded


def load(overlay: str) -> list[Document]:
    """Return a copy of the overlay's manifests that the caller may change."""
    return deepcopy(_parsed(overlay))


@cache
def _parsed(overlay: str) -> list[Document]:
    text = (DEPLOY / "rendered" / f"{overlay}.yaml").read_text()
    return list(yaml.safe_load_all(text))


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def pod_kinds(documents: list[Document]) -> list[PodKind]:
    return [pod for document in documents for pod in _pods_of(document)]


def _pods_of(document: Document) -> Iterator[PodKind]:
    name = document["metadata"]["name"]
    if document["kind"] == "Deployment":
        template = document["spec"]["template"]
        yield PodKind(name, name, template["spec"], template["metadata"]["labels"])
    elif document["kind"] == "LeaderWorkerSet":
        yield from _pods_of_group(name, document["spec"]["leaderWorkerTemplate"])
    elif document["kind"] == "DisaggregatedSet":
        for role in document["spec"]["roles"]:
            yield from _pods_of_group(role["name"], role["spec"]["leaderWorkerTemplate"])


def _pods_of_group(role: str, group: Document) -> Iterator[PodKind]:
    """Return the pods of a group; a group of one has no leader template and uses the workers'."""
    alone = group["size"] == 1
    for index in range(group["size"]):
        part = "worker" if alone or index else "leader"
        template = group[f"{part}Template"]
        labels = {**template["metadata"]["labels"], WORKER_INDEX: str(index)}
        yield PodKind(
            role if alone else f"{role}-{part}",
            role,
            template["spec"],
            labels,
            index,
            group["size"],
        )


def selects(selector: Document, labels: Mapping[str, str]) -> bool:
    """Evaluate Kubernetes' label selector: matchLabels and the operator In."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True
