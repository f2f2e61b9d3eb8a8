"""Configuration that `baton up` derives from its flags."""

from pathlib import Path

import pytest

from baton.cluster_config import ClusterConfig, demo_model
from baton.fork_server import ForkServer
from baton.up_command import UpConfig
from runtime.errors import ConfigError
from runtime.observe.log import LogStyle


def test_without_flags_it_is_the_cluster_that_code_gets_without_settings() -> None:
    assert UpConfig().cluster(None) == ClusterConfig(model=demo_model())


def test_a_flag_of_the_cluster_is_its_setting() -> None:
    given = {
        "model": Path("m"),
        "prefill": 3,
        "decode_tp": 2,
        "decode_partition": "3,5",
        "listen": "h:1",
        "memory_mb": 7,
        "max_context": 99,
        "http": "h:2",
        "config_file": Path("f"),
        "log_level": "debug",
        "log_style": LogStyle.JSON,
    }
    assert UpConfig.model_validate(given).cluster(None) == ClusterConfig.model_validate(given)


def test_worker_flags_go_to_workers_and_shared_flags_to_routers_too() -> None:
    given = UpConfig(
        numerics="fast",
        draft=Path("d"),
        transport_interface="eth0",
        otel_endpoint="http://h:4317",
    )
    cluster = given.cluster(None)
    assert cluster.worker_flags == (
        *("--numerics", "fast"),
        *("--transport-interface", "eth0"),
        *("--draft", "d"),
        *("--otel-endpoint", "http://h:4317"),
    )
    assert cluster.router_flags == ("--otel-endpoint", "http://h:4317")


@pytest.mark.parametrize(
    ("preload", "device", "forks", "pinned"),
    [
        (True, None, True, True),
        (True, "cpu", True, True),
        (False, None, False, True),
        (True, "cuda:1", False, False),
    ],
)
def test_workers_are_forks_and_have_a_core_each_on_the_cpu_only(
    preload: bool,  # noqa: FBT001
    device: str | None,
    forks: bool,  # noqa: FBT001
    pinned: bool,  # noqa: FBT001
) -> None:
    cluster = UpConfig(preload=preload, device=device).cluster(None)
    assert (cluster.forks_workers, cluster.one_core_each) == (forks, pinned)


def test_the_fork_server_is_the_given_one() -> None:
    with ForkServer() as server:
        assert UpConfig().cluster(server).fork_server is server


def test_the_credentials_are_shown_to_the_processes(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef0123")
    cluster = UpConfig(token_file=tmp_path / "token").cluster(None)
    assert cluster.security.token is not None
    assert cluster.client_flags == ("--token-file", str(tmp_path / "token"))
    assert not UpConfig().cluster(None).client_flags
    with pytest.raises(ConfigError, match="tls_ca is missing"):
        UpConfig(tls_cert=tmp_path / "token").cluster(None)
