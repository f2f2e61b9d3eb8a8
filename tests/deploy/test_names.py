"""Every flag, setting, variable, port, label, health name and address in the manifests is one that
the code has."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from prometheus_client import CollectorRegistry

from baton.gateway import GatewayConfig
from baton.gateway import app as gateway_app
from decode.worker import DecodeRole
from engine.core.layer_range import Placement
from engine.core.numerics import HOST, Numerics
from planner.command import app as planner_app
from planner.config import PlannerConfig
from pool.leader_server import WORKER_SERVICE
from pool.main import worker_command
from pool.pipeline.follower import GOODBYE_S
from pool.serving import PIPELINE_SERVICE
from pool.stage.backends import check_offered
from pool.stage.config import WorkerConfig
from prefill.worker import PrefillRole
from router.api.readiness import SERVICE as ROUTER_SERVICE
from router.command import app as router_app
from router.config import RouterConfig
from router.workers.discovery import ServiceTarget, parse_target
from runtime.config import leader_from_environment, number_from_environment, parse_address
from runtime.config import load as load_config
from runtime.observe.metrics.planner import PlannerMetrics
from runtime.security.access import ClientCertificates
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
from tests.deploy.test_network_policies import UCX
from tests.support.models.tiny_models import LLAMA, tiny
from worker.config import RolesConfig

Settings = RouterConfig | WorkerConfig | GatewayConfig | PlannerConfig
SettingsOf = Callable[[PodKind], Settings]
GATEWAY = "baton.gateway"  # the module; of the other roles it is their name
APPS = {"router": router_app, GATEWAY: gateway_app, "planner": planner_app}
NO_MODEL = GatewayConfig | PlannerConfig
NO_SERVER = {"planner"}  # it serves its metrics only
SERVICE_VARIABLES = {  # expanded in arguments
    "PREFILL_SERVICE",
    "DECODE_SERVICE",
    "ROUTER_SERVICE",
    "ROUTERS_SERVICE",
}
UCX_VARIABLES = {"UCX_TLS"}  # read by UCX itself
STOPPING_S = 5  # from the end of the drain to the end of the process


@pytest.fixture(params=OVERLAYS)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return load(request.param)


@pytest.fixture
def settings_of(
    documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SettingsOf:
    """Parse the arguments and environment of a pod's process with the real command lines."""
    (config_map,) = of_kind(documents, "ConfigMap")
    file = tmp_path / "baton.toml"
    file.write_text(config_map["data"]["baton.toml"])

    def settings(pod: PodKind) -> Settings:
        role, *arguments = pod.arguments
        app = _app(role)
        with monkeypatch.context() as patch:
            for name, value in pod.environment.items():
                patch.setenv(name, value)
            flags = dict(typer.main.get_command(app).make_context(role, arguments).params)
        given = {name: value or None for name, value in flags.items() if value not in ([], ())}
        if role == GATEWAY:
            return load_config(
                GatewayConfig, section="gateway", flags={**given, "stored_responses": 0}
            )
        assert given.pop("config") == Path("/etc/baton/baton.toml")
        if role == "router":
            return load_config(RouterConfig, section=role, flags=given, file=file)
        if role == "planner":
            return load_config(PlannerConfig, section=role, flags=given, file=file)
        given["rank"] = number_from_environment("RANK", pod.environment)
        given["world_size"] = number_from_environment("WORLD_SIZE", pod.environment)
        given["leader"] = leader_from_environment(pod.environment)
        worker = RolesConfig if role == "worker" else WorkerConfig
        return load_config(worker, section=role, flags=given, file=file)

    return settings


def _app(role: str) -> typer.Typer:
    settings = RolesConfig if role == "worker" else WorkerConfig
    return APPS[role] if role in APPS else worker_command(role, lambda flags, path: 0, settings)


def test_arguments_and_settings_are_those_of_the_roles(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    for pod in pod_kinds(documents):
        settings = settings_of(pod)
        assert pod.container["args"][0] == (GATEWAY if pod.role == "gateway" else pod.role)
        if not isinstance(settings, NO_MODEL):
            assert str(settings.model).startswith("/models/")
            assert settings.model_name
        volumes = {volume["name"] for volume in pod.spec["volumes"]}
        assert {mount["name"] for mount in pod.container["volumeMounts"]} == volumes


def test_stages_and_their_ranks_know_their_place(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    leader, places = "decode-0.decode.baton:7000", []
    for pod in pod_kinds(documents):
        if isinstance(settings := settings_of(pod), WorkerConfig):
            assert (settings.rank, settings.world_size) == (pod.index, pod.group_size)
            assert settings.leader == (leader if pod.role == "decode" else "")
            places += [settings.placement] if pod.role == "decode" else []
    if not places:
        assert {pod.name for pod in pod_kinds(documents)} >= {"router", "worker"}
        return
    tp = places[0].tensor.size
    assert places == [Placement.of(rank, len(places), tp) for rank in range(len(places))]
    assert (len(places) // tp, tp) == (2, 2 if documents == load("ranks") else 1)


def test_workers_request_resources_of_their_device(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    devices = set()
    for pod in pod_kinds(documents):
        if isinstance(settings := settings_of(pod), WorkerConfig):
            devices.add(settings.device)
            if (device := torch.device(settings.device)) != HOST:
                check_offered(device, Numerics(settings.numerics), tiny(LLAMA))
    assert devices == {"cuda" if documents == load("gpu") else "cpu"}


def test_all_workers_and_routers_serve_one_model(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    all_settings = [settings_of(pod) for pod in pod_kinds(documents)]
    assert (
        len(
            {
                (each.model, each.model_name)
                for each in all_settings
                if not isinstance(each, NO_MODEL)
            }
        )
        == 1
    )


def test_every_key_of_the_settings_file_is_a_flag() -> None:
    for role, table in tomllib.loads((DEPLOY / "base" / "baton.toml").read_text()).items():
        app = _app(role)
        flags = {
            option for parameter in typer.main.get_command(app).params for option in parameter.opts
        }
        assert {f"--{key.replace('_', '-')}" for key in table} <= flags


def test_ports_are_the_ones_listened_on(documents: list[Document], settings_of: SettingsOf) -> None:
    for pod in pod_kinds(documents):
        settings, container = settings_of(pod), pod.container
        if isinstance(settings, PlannerConfig):
            (port,) = container["ports"]
            assert port == {"name": "metrics", "containerPort": settings.metrics_port}
            probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness")]
            assert probes == [{"port": settings.metrics_port, "path": "/metrics"}] * 2
            assert settings.metrics_host == "0.0.0.0"
            continue
        own_port = parse_address(settings.listen).port
        protocol = "http" if isinstance(settings, GatewayConfig) else "grpc"
        expected = {protocol: own_port, "metrics": settings.metrics_port}
        if not isinstance(settings, GatewayConfig) and settings.health_listen is not None:
            health = parse_address(settings.health_listen)
            assert health.host == "0.0.0.0"
            expected["health"] = health.port
        assert {port["name"]: port["containerPort"] for port in container["ports"]} == expected
        assert parse_address(settings.listen).host == settings.metrics_host == "0.0.0.0"
        asks = "httpGet" if protocol == "http" else "grpc"
        probes = [
            container[f"{name}Probe"][asks]["port"] for name in ("startup", "liveness", "readiness")
        ]
        assert probes == [expected.get("health", own_port)] * 3
    for service in of_kind(documents, "Service"):
        expected_port = "http" if service["metadata"]["name"] == "gateway" else "grpc"
        assert [port["targetPort"] for port in service["spec"]["ports"]] == [expected_port]
    for monitor in of_kind(documents, "PodMonitor"):
        assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == [
            "metrics"
        ]


def test_every_pod_has_the_certificate_of_its_role_or_none_has(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    secured = set()
    for pod in pod_kinds(documents):
        settings, mounts = (
            settings_of(pod),
            {m["name"]: m["mountPath"] for m in pod.container["volumeMounts"]},
        )
        if isinstance(settings, GatewayConfig):
            continue
        secrets = {v["name"]: v["secret"] for v in pod.spec["volumes"] if "secret" in v}
        files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
        secured.add(files != (None, None, None))
        if files == (None, None, None):
            assert not secrets
            continue
        if isinstance(settings, PlannerConfig):
            assert secrets["tls"]["secretName"] == "operator-tls"
            assert settings.token_file == Path(mounts["token"]) / "token"
            assert secrets["token"]["secretName"] == "operator-token"
            continue
        assert files == tuple(
            Path(mounts["tls"]) / name for name in ("tls.crt", "tls.key", "ca.crt")
        )
        assert secrets["tls"]["secretName"] == f"{pod.role}-tls"
        assert settings.health_listen is not None, "Kubernetes' probes know no TLS"
        assert {secret["defaultMode"] for secret in secrets.values()} == {0o440}
        if isinstance(settings, RouterConfig):
            assert settings.token_file == Path(mounts["tokens"]) / "tokens"
            assert settings.client_certificates is ClientCertificates.NONE, (
                "tokens say who a client is"
            )
            assert settings.operator_tokens == ("operator",)
    assert len(secured) == 1
    if any(pod.role == "gateway" for pod in pod_kinds(documents)):
        assert secured == {False}, "a gateway shows routers neither a certificate nor a token"
    protocols = {
        port["appProtocol"]
        for service in of_kind(documents, "Service")
        for port in service["spec"]["ports"]
    }
    assert protocols - {"http"} == {"https" if secured == {True} else "kubernetes.io/h2c"}


def test_ucx_is_bound_to_the_ports_that_are_open(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    for pod in pod_kinds(documents):
        if isinstance(settings := settings_of(pod), WorkerConfig):
            assert settings.binding.ports == UCX
            assert "eth0" in settings.binding.devices


def test_probes_ask_for_the_health_names_of_the_code(documents: list[Document]) -> None:
    expected = {
        "router": ROUTER_SERVICE,
        "prefill": PrefillRole().services["prefill"],
        "decode-leader": DecodeRole().services["decode"],
        "decode-worker": PIPELINE_SERVICE,
        "worker": WORKER_SERVICE,
    }
    for pod in pod_kinds(documents):
        if pod.role == "gateway":
            paths = [
                pod.container[f"{name}Probe"]["httpGet"]["path"]
                for name in ("startup", "liveness", "readiness")
            ]
            assert paths == ["/liveness", "/liveness", "/readiness"]
        if pod.role == "gateway" or pod.role in NO_SERVER:
            continue
        assert pod.container["readinessProbe"]["grpc"]["service"] == expected[pod.name]
        assert "service" not in pod.container["livenessProbe"]["grpc"], (
            "alive is the process, not its pool"
        )


def test_variables_are_read_by_the_roles_or_by_ucx(documents: list[Document]) -> None:
    launcher = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    for pod in pod_kinds(documents):
        assert set(pod.environment) <= UCX_VARIABLES | SERVICE_VARIABLES | (
            launcher if pod.role == "decode" else set()
        )
        assert not re.search(r"\$\(", " ".join(pod.environment.values())), (
            "a reference that nobody expands"
        )


def test_grace_periods_are_longer_than_drains(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    needed = {}
    for pod in pod_kinds(documents):
        settings = settings_of(pod)
        if isinstance(settings, PlannerConfig):
            continue  # nothing runs in it
        pause_s = pod.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        goodbye_s = GOODBYE_S if pod.index else 0  # a stage waits for its leader's
        needed[pod.name] = pause_s + settings.drain_s + goodbye_s
        assert pod.spec["terminationGracePeriodSeconds"] >= needed[pod.name] + STOPPING_S
    assert needed.get("decode-worker", 0) >= needed.get("decode-leader", 0), (
        "stages outlive their draining leader"
    )


def test_selectors_meet_pods(documents: list[Document]) -> None:
    pods = pod_kinds(documents)
    for document in of_kind(documents, "PodDisruptionBudget", "PodMonitor", "Deployment"):
        role = document["metadata"]["name"]
        if document["kind"] == "PodMonitor" and all(pod.role != role for pod in pods):
            continue  # of a component that not every overlay has
        assert {p.role for p in pods if selects(document["spec"]["selector"], p.labels)} == {role}
    for document in of_kind(documents, "Service"):
        selector = {"matchLabels": document["spec"]["selector"]}
        name = document["metadata"]["name"]
        assert {p.name for p in pods if selects(selector, p.labels)} == {
            "router" if name == "routers" else name
        }
    scaled = {
        (d["kind"], d["metadata"]["name"])
        for d in of_kind(documents, "Deployment", "LeaderWorkerSet")
    }
    for document in of_kind(documents, "ScaledObject"):
        target = document["spec"]["scaleTargetRef"]
        assert (target.get("kind", "Deployment"), target["name"]) in scaled


def test_routers_find_the_leaders_of_every_pool(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    (router,) = [settings_of(pod) for pod in pod_kinds(documents) if pod.role == "router"]
    assert isinstance(router, RouterConfig)
    services = {
        document["metadata"]["name"]: document["spec"] for document in of_kind(documents, "Service")
    }
    both = "worker" if "worker" in services else ""
    for targets, leader in (
        (router.prefill, both or "prefill"),
        (router.decode, both or "decode-leader"),
    ):
        (place,) = [parse_target(target) for target in targets]
        assert isinstance(place, ServiceTarget)
        assert not place.namespace, "the router's own"
        service = services[place.service]
        assert service["clusterIP"] == "None"
        assert place.port in [port["name"] for port in service["ports"]]
        assert not service.get("publishNotReadyAddresses"), "ready must mean ready"
        assert {
            pod.name
            for pod in pod_kinds(documents)
            if selects({"matchLabels": service["selector"]}, pod.labels)
        } == {leader}


def test_gateways_call_the_service_of_routers_that_know_their_contract(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    services = {
        document["metadata"]["name"]: document["spec"] for document in of_kind(documents, "Service")
    }
    all_settings = [settings_of(pod) for pod in pod_kinds(documents)]
    for gateway in [settings for settings in all_settings if isinstance(settings, GatewayConfig)]:
        (address,) = map(parse_address, gateway.router)
        assert {port["port"] for port in services[address.host]["ports"]} == {address.port}
        (router,) = [settings for settings in all_settings if isinstance(settings, RouterConfig)]
        assert router.vllm_engine
        assert router.max_connection_age_s is not None, (
            "else each gateway stays with the router that it found first"
        )


def test_what_scales_a_role_is_exported_by_the_planner_of_the_overlay() -> None:
    """The queries name its metric, role and namespace; a lost series must not scale anything down."""
    documents = load("rdma")
    registry = CollectorRegistry()
    PlannerMetrics.create(registry).wanted.labels("decode")
    assert "planner" in {pod.role for pod in pod_kinds(documents)}
    assert "planner" in {each["metadata"]["name"] for each in of_kind(documents, "PodMonitor")}
    triggers = {
        document["metadata"]["name"]: trigger
        for document in of_kind(documents, "ScaledObject")
        for trigger in document["spec"]["triggers"]
    }
    assert triggers.pop("router")["type"] == "cpu"
    for role, trigger in triggers.items():
        query = trigger["metadata"]["query"]
        name, selector = re.fullmatch(r"max\((\w+)\{(.+)\}\)", query).groups()  # type: ignore[union-attr]
        assert registry.get_sample_value(name, {"role": "decode"}) is not None
        assert selector == f'namespace="baton",role="{role}"'
        assert trigger["metricType"] == "AverageValue"
        assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert triggers.keys() == {"prefill", "decode"}


def test_the_planner_reads_every_router_by_its_own_address(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "Service")}
    for pod in pod_kinds(documents):
        settings = settings_of(pod)
        if isinstance(settings, PlannerConfig):
            (address,) = map(parse_address, settings.router)
            assert services[address.host]["clusterIP"] == "None"
            assert {port["port"] for port in services[address.host]["ports"]} == {address.port}
            workload = next(
                each
                for each in of_kind(documents, "Deployment")
                if each["metadata"]["name"] == "planner"
            )
            assert workload["spec"]["replicas"] == 1
            assert workload["spec"]["strategy"] == {"type": "Recreate"}


def test_only_routers_have_a_permission_and_it_is_to_read_endpoints(
    documents: list[Document], settings_of: SettingsOf
) -> None:
    (role,), (binding,) = of_kind(documents, "Role"), of_kind(documents, "RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [(subject["kind"], subject["name"]) for subject in binding["subjects"]] == [
        ("ServiceAccount", "router")
    ]
    for pod in pod_kinds(documents):
        projected = {
            volume["name"]: volume["projected"]["sources"]
            for volume in pod.spec["volumes"]
            if "projected" in volume
        }
        assert bool(projected) == (pod.role == "router"), "nobody else gets a token"
        if isinstance(settings := settings_of(pod), RouterConfig):
            ((name, sources),) = projected.items()
            (mount,) = [mount for mount in pod.container["volumeMounts"] if mount["name"] == name]
            assert Path(mount["mountPath"]) == settings.service_account
            paths = [
                item["path"]
                for source in sources
                for part in source.values()
                for item in part.get("items", [part])
            ]
            assert paths == ["token", "ca.crt", "namespace"]


def test_pods_are_confined(documents: list[Document]) -> None:
    accounts = {d["metadata"]["name"]: d for d in of_kind(documents, "ServiceAccount")}
    for pod in pod_kinds(documents):
        security = pod.container["securityContext"]
        assert security == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
        assert accounts[pod.spec["serviceAccountName"]]["automountServiceAccountToken"] is False
        resources = pod.container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert {"cpu", "memory"} <= set(resources["requests"])


def test_the_image_matches_the_manifests(documents: list[Document]) -> None:
    dockerfile = (DEPLOY / "images" / "Dockerfile").read_text()
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"EXTRAS=([\w,]+)", dockerfile)
    assert extras
    for named in extras:
        assert (
            {"ucx", "http", "otel", "vllm"}
            <= set(named.split(","))
            <= project["optional-dependencies"].keys()
        )
    targets = set(re.findall(r"FROM \S+ AS (\S+)", dockerfile))
    assert set(re.findall(r"--target (\S+)", dockerfile)) | {"default"} <= targets
    assert dockerfile.rstrip().endswith("FROM base AS default")
    assert 'ENTRYPOINT ["python", "-m"]' in dockerfile
    for pod in pod_kinds(documents):
        context: dict[str, Any] = pod.spec["securityContext"]
        assert f"USER {context['runAsUser']}:{context['runAsGroup']}" in dockerfile
        assert pod.container["image"] in {
            f"baton:{project['version']}{kind}" for kind in ("", "-rdma", "-gpu")
        }
        if "/models/demo" in pod.container["args"]:
            assert "COPY demo/model /models/demo" in dockerfile


def test_compiled_kernels_are_kept_on_a_volume(documents: list[Document]) -> None:
    """The root file system is read-only; without a place to keep them every start would compile
    them again."""
    dockerfile = (DEPLOY / "images" / "Dockerfile").read_text()
    places = re.findall(
        r"(?:NUMBA_CACHE_DIR|TRITON_CACHE_DIR|FLASHINFER_WORKSPACE_BASE)=(\S+)", dockerfile
    )
    assert len(places) == 3
    for pod in pod_kinds(documents):
        if pod.role in ("prefill", "decode", "worker"):
            (mount,) = [
                mount for mount in pod.container["volumeMounts"] if mount["name"] == "kernels"
            ]
            (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == "kernels"]
            assert all(Path(place).is_relative_to(mount["mountPath"]) for place in places)
            assert "emptyDir" in volume
            assert not mount.get("readOnly")
