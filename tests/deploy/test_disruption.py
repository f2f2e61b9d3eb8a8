"""Drains and failures leave a serving cluster: disruption budgets, and which pods share a node."""

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tests.deploy.manifests import OVERLAYS, Document, PodKind, load, of_kind, pod_kinds, selects
from tests.deploy.test_examples import FOLDERS, example

# a label that the controller gives all pods of one group
GROUP_KEY = "leaderworkerset.sigs.k8s.io/group-key"
HOST = "kubernetes.io/hostname"
SINGLE = {"planner", "cache-server"}
RENDERED = [*OVERLAYS, *FOLDERS]


@pytest.fixture(params=RENDERED)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return load(request.param) if request.param in OVERLAYS else example(request.param)


def several(documents: list[Document]) -> list[PodKind]:
    """Return the kinds of pods of which there can be several."""
    return [pod for pod in pod_kinds(documents) if pod.role not in SINGLE]


@dataclass(frozen=True)
class Pod:
    """A pod that the scheduler has to place."""

    kind: PodKind
    group: str  # the pool, or the pod itself

    @property
    def labels(self) -> Mapping[str, str]:
        return (
            {**self.kind.labels, GROUP_KEY: self.group}
            if self.kind.group_size > 1
            else self.kind.labels
        )


@dataclass
class Nodes:
    """Nodes filled by the scheduler's preferences: affinities first, then the spread; of equals,
    any."""

    count: int
    rng: random.Random
    pods: dict[int, list[Pod]] = field(default_factory=lambda: defaultdict(list))

    def place(self, pod: Pod) -> None:
        shuffled = self.rng.sample(range(self.count), self.count)
        self.pods[
            min(shuffled, key=lambda node: (-self._affinity(pod, node), self._spread(pod, node)))
        ].append(pod)

    def _affinity(self, pod: Pod, node: int) -> int:
        affinity, score = pod.kind.spec.get("affinity", {}), 0
        for name, sign in (("podAffinity", 1), ("podAntiAffinity", -1)):
            for preferred in affinity.get(name, {}).get(
                "preferredDuringSchedulingIgnoredDuringExecution", []
            ):
                term = preferred["podAffinityTerm"]
                assert term["topologyKey"] == HOST
                score += sign * preferred["weight"] * self._meant(term, pod, node)
        return score

    def _spread(self, pod: Pod, node: int) -> int:
        constraints = pod.kind.spec.get("topologySpreadConstraints", [])
        assert all(
            rule["topologyKey"] == HOST and rule["whenUnsatisfiable"] == "ScheduleAnyway"
            for rule in constraints
        )
        return sum(self._meant(rule, pod, node) for rule in constraints)

    def _meant(self, term: Document, pod: Pod, node: int) -> int:
        """Count the pods of the node that a term of `pod` selects."""
        same, other = term.get("matchLabelKeys", []), term.get("mismatchLabelKeys", [])
        return sum(
            selects(term["labelSelector"], placed.labels)
            and all(placed.labels.get(key) == pod.labels[key] for key in same if key in pod.labels)
            and all(placed.labels.get(key) != pod.labels[key] for key in other if key in pod.labels)
            for placed in self.pods[node]
        )


def test_every_budget_lets_broken_pods_go(documents: list[Document]) -> None:
    """Else a node with a pod that is not ready cannot be drained for as long as it is not."""
    budgets = of_kind(documents, "PodDisruptionBudget")
    assert [
        budget["metadata"]["name"]
        for budget in budgets
        if budget["spec"].get("unhealthyPodEvictionPolicy") != "AlwaysAllow"
    ] == []


def test_every_role_of_several_has_a_budget() -> None:
    for overlay in set(OVERLAYS) - {"laptop"}:
        documents = load(overlay)
        budgets = of_kind(documents, "PodDisruptionBudget")
        for pod in several(documents):
            assert (
                sum(selects(budget["spec"]["selector"], pod.labels) for budget in budgets) == 1
            ), (overlay, pod.name)


def test_every_pod_of_several_is_spread_from_its_like(documents: list[Document]) -> None:
    for pod in several(documents):
        constraints = pod.spec.get("topologySpreadConstraints", [])
        assert [rule["topologyKey"] for rule in constraints] == [HOST], pod.name
        assert all(selects(rule["labelSelector"], pod.labels) for rule in constraints), pod.name
        terms = [
            preferred["podAffinityTerm"]
            for term in pod.spec.get("affinity", {}).values()
            for preferred in term["preferredDuringSchedulingIgnoredDuringExecution"]
        ]
        assert all(selects(term["labelSelector"], pod.labels) for term in terms), pod.name


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_no_node_takes_two_of_a_role_with_it(documents: list[Document], num_nodes: int) -> None:
    """Two of everything on two nodes or three, in any order in which controllers may make them: a
    leader comes before its other stages."""
    kinds = several(documents)
    for seed in range(30):
        rng = random.Random(seed)
        nodes = Nodes(num_nodes, rng)
        groups = [
            (name, number) for name in {_owner(kind) for kind in kinds} for number in range(2)
        ]
        waiting = {
            group: [
                Pod(kind, f"{group[0]}-{group[1]}") for kind in kinds if _owner(kind) == group[0]
            ]
            for group in groups
        }
        while waiting:
            group = rng.choice(sorted(waiting))
            nodes.place(waiting[group].pop(0))
            if not waiting[group]:
                del waiting[group]
        for pods in nodes.pods.values():
            shared = {(_owner(pod.kind), pod.group) for pod in pods}
            assert len(shared) == len({owner for owner, _ in shared}), (
                f"seed {seed}: {sorted(shared)} share a node"
            )
        places: dict[str, set[int]] = defaultdict(set)
        for node, pods in nodes.pods.items():
            for pod in pods:
                places[pod.group].add(node)
        assert all(len(found) == 1 for found in places.values()), (
            f"seed {seed}: a pool is torn apart: {places}"
        )


def _owner(kind: PodKind) -> str:
    """Return the workload that makes the pod; a pool's leader and workers share one."""
    return kind.name.removesuffix("-leader").removesuffix("-worker")
