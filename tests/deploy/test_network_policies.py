"""Who can reach whom: the policies are evaluated as a network plugin does it, and must give exactly these edges."""

import pytest

from tests.deploy.manifests import OVERLAYS, Document, PodKind, load, of_kind, pod_kinds, selects

GRPC, METRICS, UCX = (7000, 7000), (9090, 9090), (7300, 7363)
Edge = tuple[str, str, tuple[int, int]]

EDGES: set[Edge] = {
    ("router", "prefill", GRPC), ("router", "decode-leader", GRPC),
    ("decode-worker", "decode-leader", GRPC), ("decode-leader", "decode-leader", GRPC),
    ("prefill", "decode-leader", UCX), ("prefill", "decode-worker", UCX),
    ("decode-leader", "prefill", UCX), ("decode-worker", "prefill", UCX),
    ("decode-leader", "decode-worker", UCX), ("decode-worker", "decode-leader", UCX),
    ("decode-leader", "decode-leader", UCX), ("decode-worker", "decode-worker", UCX),
}


def _allowed(policies: list[Document], pod: PodKind, peer: PodKind, direction: str) -> set[tuple[int, int]]:
    """Port ranges that `pod`'s policies of one direction open towards `peer`."""
    rules = [rule for policy in policies if selects(policy["spec"]["podSelector"], pod.labels)
             for rule in policy["spec"].get(direction, [])]
    side = "from" if direction == "ingress" else "to"
    return {(port["port"], port.get("endPort", port["port"]))
            for rule in rules for port in rule["ports"]
            if any("podSelector" in other and "namespaceSelector" not in other
                   and selects(other["podSelector"], peer.labels) for other in rule[side])}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_exactly_these_edges_are_open_between_pods(overlay: str) -> None:
    documents = load(overlay)
    pods, policies = pod_kinds(documents), of_kind(documents, "NetworkPolicy")
    edges = {(source.name, target.name, ports) for source in pods for target in pods
             for ports in _allowed(policies, source, target, "egress") & _allowed(policies, target, source, "ingress")}
    assert edges == EDGES


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_routers_reach_the_api_server_and_only_stages_dns(overlay: str) -> None:
    documents = load(overlay)
    policies = of_kind(documents, "NetworkPolicy")
    outward = {(pod.name, port["port"])
               for pod in pod_kinds(documents) for policy in policies
               if selects(policy["spec"]["podSelector"], pod.labels)
               for rule in policy["spec"].get("egress", []) for port in rule["ports"]
               if any("ipBlock" in peer or "namespaceSelector" in peer for peer in rule["to"])}
    assert outward == {("router", 443), ("router", 6443), ("decode-leader", 53), ("decode-worker", 53)}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_else_is_denied(overlay: str) -> None:
    policies = of_kind(load(overlay), "NetworkPolicy")
    (default,) = [policy for policy in policies if policy["metadata"]["name"] == "default-deny"]
    assert default["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_outside_reaches_routers_and_metrics_only(overlay: str) -> None:
    documents = load(overlay)
    policies = of_kind(documents, "NetworkPolicy")
    outside = {(pod.name, port["port"])
               for pod in pod_kinds(documents) for policy in policies
               if selects(policy["spec"]["podSelector"], pod.labels)
               for rule in policy["spec"].get("ingress", []) for port in rule["ports"]
               if any("namespaceSelector" in peer for peer in rule["from"])}
    scraped = {(pod.name, METRICS[0]) for pod in pod_kinds(documents)} if of_kind(documents, "PodMonitor") else set()
    assert outside == {("router", GRPC[0])} | scraped
