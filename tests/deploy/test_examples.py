"""Examples are as good as the overlays: valid, two models apart from each other, and names that the
overlays have."""

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, Document, load, of_kind, pod_kinds, selects
from tests.deploy.schemas import OLDEST, problems
from tests.deploy.test_network_policies import EDGES, GATEWAY_EDGES, allowed

MODELS = ("small", "large")
WITHOUT_SCHEMA = {"HTTPRoute", "InferencePool"}  # their definitions are not in this repository
RELEASES = {"gpu-claims": "1.34"}  # of Kubernetes, if an example needs a later one
FOLDERS = sorted(path.parent.name for path in (DEPLOY / "examples").glob("*/kustomization.yaml"))


@cache
def example(name: str) -> list[Document]:
    return list(yaml.safe_load_all((DEPLOY / "rendered" / "examples" / f"{name}.yaml").read_text()))


def names(documents: list[Document], *kinds: str) -> set[str]:
    return {document["metadata"]["name"] for document in of_kind(documents, *kinds)}


def test_every_example_is_rendered_and_valid() -> None:
    assert (
        sorted(path.stem for path in (DEPLOY / "rendered" / "examples").glob("*.yaml")) == FOLDERS
    )
    known = [
        (document, RELEASES.get(name, OLDEST))
        for name in FOLDERS
        for document in example(name)
        if document["kind"] not in WITHOUT_SCHEMA
    ]
    found = {
        f"{document['kind']}/{document['metadata']['name']}": problems(document, release)
        for document, release in known
    }
    assert {name: text for name, text in found.items() if text} == {}
    assert len(known) > 30


def test_each_worker_claims_the_gpu_that_it_would_get_from_the_plugin() -> None:
    documents = example("gpu-claims")
    (template,) = of_kind(documents, "ResourceClaimTemplate")
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com"}
    before = {pod.name: pod.spec for pod in pod_kinds(load("gpu"))}
    for pod in pod_kinds(documents):
        limits = before[pod.name]["containers"][0]["resources"]["limits"]
        claims = pod.spec["containers"][0]["resources"].get("claims", [])
        assert [claim["name"] for claim in claims] == ["gpu"] * ("nvidia.com/gpu" in limits)
        assert "nvidia.com/gpu" not in pod.spec["containers"][0]["resources"]["limits"]
        if claims:
            assert pod.spec["resourceClaims"] == [
                {"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]}
            ]


def test_keda_scales_the_roles_of_a_set_by_their_scalers() -> None:
    """A role with external scaling may have no replicas of its own; its scaler is named by set and
    role."""
    documents = example("scaled-set")
    (whole,) = of_kind(documents, "DisaggregatedSet")
    names_of_scalers = {
        f"{whole['metadata']['name']}-{role['name']}" for role in whole["spec"]["roles"]
    }
    for role in whole["spec"]["roles"]:
        assert role["scaling"] == {"mode": "External"}
        assert "replicas" not in role["spec"]
    targets = [each["spec"]["scaleTargetRef"] for each in of_kind(documents, "ScaledObject")]
    assert {
        each["name"] for each in targets if each.get("kind") == "DisaggregatedSetRoleScaler"
    } == names_of_scalers
    assert {each["name"] for each in targets} == names_of_scalers | {"router"}


def test_kept_kernels_are_in_one_claim_of_all_workers() -> None:
    documents = example("kept-kernels")
    (claim,) = of_kind(documents, "PersistentVolumeClaim")
    where = {
        pod.name: volume
        for pod in pod_kinds(documents)
        for volume in pod.spec["volumes"]
        if volume["name"] == "kernels"
    }
    name = claim["metadata"]["name"]
    assert {pod.name for pod in pod_kinds(load("laptop")) if pod.role in {"prefill", "decode"}} == (
        where.keys()
    )
    for volume in where.values():
        assert volume == {"name": "kernels", "persistentVolumeClaim": {"claimName": name}}


@pytest.mark.parametrize(("name", "is_read_only"), [("disk-cache", False), ("adapters", True)])
def test_all_workers_share_a_claim(name: str, *, is_read_only: bool) -> None:
    documents = example(name)
    (claim,) = of_kind(documents, "PersistentVolumeClaim")
    read_only = {"readOnly": True} if is_read_only else {}
    workers = [pod for pod in pod_kinds(documents) if pod.role in {"prefill", "decode"}]
    assert len(workers) == 3
    for pod in workers:
        (volume,) = [each for each in pod.spec["volumes"] if each["name"] == name]
        assert volume["persistentVolumeClaim"] == {
            "claimName": claim["metadata"]["name"],
            **read_only,
        }
        (mount,) = [each for each in pod.container["volumeMounts"] if each["name"] == name]
        assert {key: mount[key] for key in read_only} == read_only
        flags = pod.container["args"]
        assert flags[flags.index(f"--{name}") + 1] == mount["mountPath"]
    for pod in pod_kinds(documents):
        if pod not in workers:
            assert f"--{name}" not in pod.container["args"]


def test_all_workers_and_nothing_else_use_the_cache_server() -> None:
    documents = example("cache-server")
    pods, policies = pod_kinds(documents), of_kind(documents, "NetworkPolicy")
    (server,) = [pod for pod in pods if pod.name == "cache-server"]
    (service,) = [
        each
        for each in of_kind(documents, "Service")
        if selects({"matchLabels": each["spec"]["selector"]}, server.labels)
    ]
    ((port,), (listens,)) = service["spec"]["ports"], server.container["ports"]
    assert port["port"] == listens["containerPort"] == 6379
    workers = {pod.name for pod in pods if pod.role in {"prefill", "decode"}}
    assert len(workers) == 3
    for pod in pods:
        flags = pod.container.get("args", [])
        assert ("--cache-server" in flags) is (pod.name in workers)
        opened = allowed(policies, pod, server, "egress") & allowed(
            policies, server, pod, "ingress"
        )
        assert opened == ({(6379, 6379)} if pod.name in workers else set())
        assert not allowed(policies, server, pod, "egress")
        if pod.name in workers:
            url = urlsplit(flags[flags.index("--cache-server") + 1])
            assert (url.hostname, url.port) == (service["metadata"]["name"], port["port"])
            (mount,) = [
                each for each in pod.container["volumeMounts"] if each["name"] == "cache-server-key"
            ]
            assert flags[flags.index("--cache-server-key") + 1] == f"{mount['mountPath']}/key"
    limit = server.container["resources"]["limits"]["memory"]
    assert limit == "1200Mi", "more than its maxmemory of 1 GiB"


def test_two_models_in_one_namespace_do_not_meet() -> None:
    """Exactly the edges of one model, twice."""
    documents = example("two-models")
    pods, policies = pod_kinds(documents), of_kind(documents, "NetworkPolicy")
    edges = {
        (source.name, target.name, ports)
        for source in pods
        for target in pods
        for ports in allowed(policies, source, target, "egress")
        & allowed(policies, target, source, "ingress")
    }
    own = {"small": EDGES | GATEWAY_EDGES, "large": EDGES}
    assert edges == {
        (f"{model}-{source}", f"{model}-{target}", ports)
        for model in MODELS
        for source, target, ports in own[model]
    }
    (namespace,) = of_kind(documents, "Namespace")
    assert {document["metadata"].get("namespace", "baton") for document in documents} == {"baton"}
    assert namespace["metadata"]["name"] == "baton", "a prefix is for what is in it"


def test_each_of_two_models_finds_its_own_workers() -> None:
    documents = example("two-models")
    pods, services = pod_kinds(documents), names(documents, "Service")
    variables = {
        pod.name: pod.environment for pod in pods if pod.name.endswith(("router", "gateway"))
    }
    assert variables == {
        "small-gateway": {"ROUTER_SERVICE": "small-router"},
        **{
            f"{model}-router": {
                "PREFILL_SERVICE": f"{model}-prefill",
                "DECODE_SERVICE": f"{model}-decode-leader",
            }
            for model in MODELS
        },
    }
    assert {name for values in variables.values() for name in values.values()} <= services
    for document in of_kind(documents, "Service", "PodDisruptionBudget", "Deployment"):
        selector = document["spec"]["selector"]
        wanted = selector if "matchLabels" in selector else {"matchLabels": selector}
        (model,) = {pod.name.partition("-")[0] for pod in pods if selects(wanted, pod.labels)}
        assert document["metadata"]["name"].startswith(f"{model}-")
    accounts, maps = names(documents, "ServiceAccount"), names(documents, "ConfigMap")
    for pod in pods:
        model = pod.name.partition("-")[0]
        named = {
            pod.spec["serviceAccountName"],
            *(
                volume["configMap"]["name"]
                for volume in pod.spec["volumes"]
                if "configMap" in volume
            ),
        }
        assert named <= accounts | maps
        assert all(name.startswith(f"{model}-") for name in named)
    for binding in of_kind(documents, "RoleBinding"):
        assert {binding["roleRef"]["name"]} <= names(documents, "Role")
        assert {subject["name"] for subject in binding["subjects"]} <= accounts


def test_the_job_fills_the_claim_that_is_served() -> None:
    documents = example("fetch-model")
    (claim,), (job,) = of_kind(documents, "PersistentVolumeClaim"), of_kind(documents, "Job")
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (prefill,) = [pod for pod in pod_kinds(load("single-node")) if pod.name == "prefill"]
    served = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in prefill.spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    filled = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert set(served.values()) == set(filled.values()) == {claim["metadata"]["name"]}
    (mount,) = [
        mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in filled
    ]
    assert container["args"][container["args"].index("--local-dir") + 1] == mount
    assert container["securityContext"] == prefill.container["securityContext"]
    assert spec["securityContext"] == prefill.spec["securityContext"]
    (policy,) = of_kind(documents, "NetworkPolicy")
    assert selects(policy["spec"]["podSelector"], job["spec"]["template"]["metadata"]["labels"])
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]} == {
        443,
        53,
    }


def test_the_command_of_the_job_has_its_flags() -> None:
    (job,) = of_kind(example("fetch-model"), "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    program = shutil.which(container["command"][0], path=str(Path(sys.executable).parent))
    assert program is not None, "it comes with huggingface-hub, which tokenizers needs"
    said = subprocess.run(
        [program, "download", "--help"], capture_output=True, text=True, timeout=120, check=True
    )
    assert {flag for flag in container["args"] if flag.startswith("--")} <= set(
        said.stdout.replace(",", " ").split()
    )


def test_a_gateways_route_and_pool_point_at_running_services() -> None:
    documents, overlay = example("inference-gateway"), load("laptop")
    services = {
        document["metadata"]["name"]: document["spec"] for document in of_kind(overlay, "Service")
    }
    (route,), (pool,) = of_kind(documents, "HTTPRoute"), of_kind(documents, "InferencePool")
    for backend in [backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]:
        assert backend["port"] in {port["port"] for port in services[backend["name"]]["ports"]}
    picked = [pod for pod in pod_kinds(overlay) if selects(pool["spec"]["selector"], pod.labels)]
    assert [pod.name for pod in picked] == ["router"]
    (port,) = pool["spec"]["targetPorts"]
    assert port["number"] in {each["containerPort"] for each in picked[0].container["ports"]}
    (served,) = services["router"]["ports"]
    assert pool["spec"]["appProtocol"] == served["appProtocol"]
