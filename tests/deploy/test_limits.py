"""Resources of a pod fit the limits of its process."""

import tomllib

import pytest

from router.config import RouterConfig
from runtime.rpc.interceptor import RECEIVING_BYTES
from tests.deploy.manifests import DEPLOY, OVERLAYS, load, pod_kinds

MIB = 1 << 20
UNITS = {"Mi": MIB, "Gi": 1 << 30}
# A router that has started, with the tokenizer of a large vocabulary; with a small one it is 82
# MiB.
STARTED_BYTES = 256 * MIB


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_routers_memory_limit_covers_client_limits(overlay: str) -> None:
    """Messages are held twice: as they came, and as the workers get them. One more while it is
    read."""
    settings = tomllib.loads((DEPLOY / "base" / "baton.toml").read_text())["router"]
    config = RouterConfig(**{"model": ".", "prefill": ("h:1",), "decode": ("h:2",), **settings})
    (router,) = [pod for pod in pod_kinds(load(overlay)) if pod.role == "router"]
    resources = router.container["resources"]
    needed = (
        STARTED_BYTES + 2 * config.max_held_bytes + 2 * RECEIVING_BYTES + config.max_message_bytes
    )
    assert needed < _bytes(resources["limits"]["memory"])
    assert resources["requests"]["memory"] == resources["limits"]["memory"], (
        "never evicted for what it may use"
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_probe_has_time_to_answer(overlay: str) -> None:
    """Kubernetes gives a probe one second by default: a process that loads weights may be busy for
    longer."""
    for pod in pod_kinds(load(overlay)):
        probes = {name for name in pod.container if name.endswith("Probe")}
        assert probes >= {"startupProbe", "livenessProbe"}
        assert "readinessProbe" in probes or pod.role == "planner"
        for probe in probes:
            assert pod.container[probe]["timeoutSeconds"] >= 2, f"{pod.name}: {probe}"
            assert pod.container[probe]["timeoutSeconds"] <= pod.container[probe]["periodSeconds"]
