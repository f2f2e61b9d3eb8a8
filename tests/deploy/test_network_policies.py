"""Allowed connections: the policies, evaluated as a network plugin does it, give exactly these
edges."""

import ipaddress

import pytest
import yaml

from tests.deploy.manifests import (
    DEPLOY,
    OVERLAYS,
    Document,
    PodKind,
    load,
    of_kind,
    pod_kinds,
    selects,
)

GRPC, METRICS, UCX, HTTP = (7000, 7000), (9090, 9090), (7300, 7363), (8000, 8000)
Edge = tuple[str, str, tuple[int, int]]

EDGES: set[Edge] = {  # of prefill workers and decode pools
    ("router", "prefill", GRPC),
    ("router", "decode-leader", GRPC),
    ("decode-worker", "decode-leader", GRPC),
    ("decode-leader", "decode-leader", GRPC),
    ("prefill", "prefill", GRPC),
    ("prefill", "decode-leader", GRPC),
    ("prefill", "prefill", UCX),
    ("prefill", "decode-leader", UCX),
    ("prefill", "decode-worker", UCX),
    ("decode-leader", "prefill", UCX),
    ("decode-worker", "prefill", UCX),
    ("decode-leader", "decode-worker", UCX),
    ("decode-worker", "decode-leader", UCX),
    ("decode-leader", "decode-leader", UCX),
    ("decode-worker", "decode-worker", UCX),
}

WORKER_EDGES: set[Edge] = {
    ("router", "worker", GRPC),
    ("worker", "worker", GRPC),
    ("worker", "worker", UCX),
}
GATEWAY_EDGES: set[Edge] = {("gateway", "router", GRPC)}
PLANNER_EDGES: set[Edge] = {("planner", "router", GRPC)}
PLANNER_AND_WORKER_EDGES: set[Edge] = {("planner", "worker", GRPC)}  # it switches their roles
ASKS_DNS = {"decode-leader", "decode-worker", "gateway", "planner"}


def _names(documents: list[Document]) -> set[str]:
    return {pod.name for pod in pod_kinds(documents)}


def expected_edges(names: set[str]) -> set[Edge]:
    """Return the connections of these kinds of pods."""
    edges = set(WORKER_EDGES if "worker" in names else EDGES)
    if "gateway" in names:
        edges |= GATEWAY_EDGES
    if "planner" in names:
        edges |= PLANNER_EDGES | (PLANNER_AND_WORKER_EDGES if "worker" in names else set())
    return edges


def allowed(
    policies: list[Document], pod: PodKind, peer: PodKind, direction: str
) -> set[tuple[int, int]]:
    """Return the port ranges that the policies of `pod` in one direction open towards `peer`."""
    rules = [
        rule
        for policy in policies
        if selects(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get(direction, [])
    ]
    side = "from" if direction == "ingress" else "to"
    return {
        (port["port"], port.get("endPort", port["port"]))
        for rule in rules
        for port in rule["ports"]
        if any(
            "podSelector" in other
            and "namespaceSelector" not in other
            and selects(other["podSelector"], peer.labels)
            for other in rule[side]
        )
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_exactly_these_edges_are_open_between_pods(overlay: str) -> None:
    documents = load(overlay)
    pods, policies = pod_kinds(documents), of_kind(documents, "NetworkPolicy")
    edges = {
        (source.name, target.name, ports)
        for source in pods
        for target in pods
        for ports in allowed(policies, source, target, "egress")
        & allowed(policies, target, source, "ingress")
    }
    assert edges == expected_edges(_names(documents))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_routers_reach_the_api_server_and_only_some_dns(overlay: str) -> None:
    documents = load(overlay)
    policies = of_kind(documents, "NetworkPolicy")
    outward = {
        (pod.name, port["port"])
        for pod in pod_kinds(documents)
        for policy in policies
        if selects(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get("egress", [])
        for port in rule["ports"]
        if any("ipBlock" in peer or "namespaceSelector" in peer for peer in rule["to"])
    }
    asks_dns = ASKS_DNS & _names(documents)
    assert outward == {("router", 443), ("router", 6443)} | {(name, 53) for name in asks_dns}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_else_is_denied(overlay: str) -> None:
    policies = of_kind(load(overlay), "NetworkPolicy")
    (default,) = [policy for policy in policies if policy["metadata"]["name"] == "default-deny"]
    assert default["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_outside_reaches_routers_and_metrics_only(overlay: str) -> None:
    documents = load(overlay)
    policies = of_kind(documents, "NetworkPolicy")
    outside = {
        (pod.name, port["port"])
        for pod in pod_kinds(documents)
        for policy in policies
        if selects(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get("ingress", [])
        for port in rule["ports"]
        if any("namespaceSelector" in peer for peer in rule["from"])
    }
    scraped = (
        {(pod.name, METRICS[0]) for pod in pod_kinds(documents)}
        if of_kind(documents, "PodMonitor")
        else set()
    )
    served = {("gateway", HTTP[0])} if "gateway" in _names(documents) else set()
    assert outside == {("router", GRPC[0])} | scraped | served


# What is no pod: NodeLocal DNSCache's own address, and an API server by either family.
NODE_LOCAL_DNS = "169.254.20.10"
API_SERVERS = ("10.96.0.1", "192.0.2.7", "fd00:10:96::1", "2001:db8::7")
ROLES = {"router", "prefill", "decode-leader", "decode-worker"}


def _reaches(policies: list[Document], pod: PodKind, address: str, port: int) -> bool:
    """Return whether a policy opens this address outside the pods to `pod`."""
    return any(
        ipaddress.ip_address(address) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
        for policy in policies
        if selects(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get("egress", [])
        if port in {other["port"] for other in rule["ports"]}
        for peer in rule["to"]
        if "ipBlock" in peer
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_dns_cache_on_the_node_is_reachable_by_all_that_use_dns(overlay: str) -> None:
    documents = load(overlay)
    policies = of_kind(documents, "NetworkPolicy")
    assert {
        pod.name for pod in pod_kinds(documents) if _reaches(policies, pod, NODE_LOCAL_DNS, 53)
    } == ASKS_DNS & _names(documents)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("address", API_SERVERS)
def test_routers_reach_api_servers_of_both_families(overlay: str, address: str) -> None:
    documents = load(overlay)
    policies = of_kind(documents, "NetworkPolicy")
    for port in (443, 6443):
        assert {
            pod.name for pod in pod_kinds(documents) if _reaches(policies, pod, address, port)
        } == {"router"}


def test_traces_reach_their_collector_and_its_name_is_found_by_all() -> None:
    """The component's policy is applied to the pods of an overlay, as no overlay has a
    collector."""
    folder = DEPLOY / "components" / "tracing"
    policy = yaml.safe_load((folder / "network-policy.yaml").read_text())
    pods = pod_kinds(load("single-node"))
    assert {pod.name for pod in pods if selects(policy["spec"]["podSelector"], pod.labels)} == ROLES
    collector, dns = policy["spec"]["egress"]
    assert [port["port"] for port in collector["ports"]] == [4317]
    (base,) = [
        other
        for other in of_kind(load("single-node"), "NetworkPolicy")
        if other["metadata"]["name"] == "dns"
    ]
    assert dns == base["spec"]["egress"][0], "the same name servers as stages have"
    component = yaml.safe_load((folder / "kustomization.yaml").read_text())
    flags = [
        step["value"] for patch in component["patches"] for step in yaml.safe_load(patch["patch"])
    ]
    assert flags == ["--otel-endpoint", "http://collector.tracing:4317"] * 3, (
        "deployments, leaders, stages"
    )
