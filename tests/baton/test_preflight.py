"""Checks and memory division before a process starts, against sums done by hand."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from baton.memory_plan import memory_flags
from baton.preflight import (
    PoolShape,
    check_apart,
    check_partition,
    check_port,
    check_tls,
    consecutive_ports,
    free_ports,
    listen_address,
    metrics_ports,
)
from runtime.config import Address, parse_address
from runtime.errors import ConfigError
from runtime.model_files.weights import loaded_bytes
from runtime.process.host_memory import HostMemory
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity, client_security
from tests.support.network.authority import Authority
from tests.support.network.ports import taken_port

MIB = 1 << 20
Tables = Mapping[str, Mapping[str, object]]


def model(folder: Path, weights_mib: int = 100, num_layers: int = 8) -> Path:
    """Create a folder with empty sparse files of that size."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"text_config": {"num_hidden_layers": num_layers}})
    )
    for shard in range(2):
        with (folder / f"model-{shard}.safetensors").open("wb") as file:
            file.truncate(weights_mib * MIB // 2)
    return folder


def shapes(
    *, prefill: int = 1, decode: int = 1, decode_pp: int = 1, flags: tuple[str, ...] = ()
) -> list[PoolShape]:
    return [
        PoolShape("prefill", prefill, 1, "", flags),
        PoolShape("decode", decode, decode_pp, "", flags),
    ]


@pytest.mark.parametrize(
    ("num_stages", "partition", "says"),
    [
        (1, "3,5", "--decode-partition 3,5 is for 2 stages, and --decode-pp is 1"),
        (3, "3,5", "is for 2 stages, and --decode-pp is 3"),
        (2, "3,4", "sums to 7, the model has 8 layers"),
        (2, "0,8", "at least 1 each"),
        (2, "3;5", "must be numbers of layers"),
        (1, "balanced", "is for several stages, and --decode-pp is 1"),
    ],
)
def test_a_partition_fits_stages_and_layers(
    tmp_path: Path, num_stages: int, partition: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_partition(
            PoolShape("decode", 1, num_stages, partition, ()), model(tmp_path / "model")
        )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "must contain a JSON object"),
        ('{"text_config": 5}', "text_config must be an object"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: str, says: str) -> None:
    (model(tmp_path / "model") / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"config\.json.* {says}"):
        check_partition(PoolShape("decode", 1, 1, "8", ()), tmp_path / "model")


def test_weights_that_are_no_files_count_nothing(tmp_path: Path) -> None:
    (tmp_path / "dangling.safetensors").symlink_to("nowhere")
    (tmp_path / "folder.safetensors").mkdir()
    nested = b"[" * 100_000
    (tmp_path / "deep.safetensors").write_bytes(len(nested).to_bytes(8, "little") + nested)
    assert loaded_bytes(tmp_path) == 100_008


def test_a_partition_that_fits(tmp_path: Path) -> None:
    check_partition(PoolShape("decode", 1, 2, "3, 5", ()), model(tmp_path / "model"))
    check_partition(PoolShape("decode", 1, 1, "", ()), Path("/nowhere"))
    check_partition(PoolShape("decode", 1, 2, "balanced", ()), Path("/nowhere"))


def test_a_port_that_is_taken_is_named_with_its_flag() -> None:
    with taken_port("127.0.0.1") as port:
        with pytest.raises(
            ConfigError, match=rf"--listen 127.0.0.1:{port}: Address already in use; is another"
        ):
            check_port(Address("127.0.0.1", port), flag="--listen")
        for _ in range(2):  # looking does not take it
            check_port(Address("127.0.0.1", port + 1), flag="--listen")
    check_port(Address("127.0.0.1", 0), flag="--listen")
    with pytest.raises(
        ConfigError, match=r"--listen 192\.0\.2\.1:7000: Cannot assign requested address$"
    ):
        check_port(Address("192.0.2.1", 7000), flag="--listen")


def test_the_files_metrics_ports_count_up() -> None:
    tables: Tables = {"router": {"metrics_port": 29190}, "decode": {"metrics_port": 29191}}
    names = {"router": ["router"], "prefill": ["prefill-0"], "decode": ["decode-0.0", "decode-0.1"]}
    assert metrics_ports(tables, names) == {
        "router": 29190,
        "prefill-0": 0,
        "decode-0.0": 29191,
        "decode-0.1": 29192,
    }
    with pytest.raises(
        ConfigError,
        match=r"decode\.metrics_port 29190: decode-0\.0 would take 29190, and router uses it",
    ):
        metrics_ports({**tables, "decode": {"metrics_port": 29190}}, names)
    with pytest.raises(
        ConfigError, match=r"decode-0\.1 would take 65536, and there is no such port"
    ):
        metrics_ports({"decode": {"metrics_port": 65535}}, names)
    for wrong in (65536, "9090", True, -1):
        with pytest.raises(
            ConfigError, match=r"router\.metrics_port: must be a port from 0 to 65535"
        ):
            metrics_ports({"router": {"metrics_port": wrong}}, names)


def test_one_flag_gives_every_process_its_metrics_port() -> None:
    names = {"router": ["router"], "prefill": [], "decode": ["decode-0.0", "decode-0.1"]}
    with (
        taken_port("127.0.0.1") as taken,
        pytest.raises(ConfigError, match=rf"--metrics-port 127\.0\.0\.1:{taken}: "),
    ):
        consecutive_ports(taken - 1, names)
    assert consecutive_ports(taken, names) == {
        "router": taken,
        "decode-0.0": taken + 1,
        "decode-0.1": taken + 2,
    }
    with pytest.raises(
        ConfigError, match=r"decode-0\.1 would take 65536, and there is no such port"
    ):
        consecutive_ports(65534, names)


def test_the_file_sets_the_routers_address_unless_a_flag_does() -> None:
    tables = {"router": {"listen": "0.0.0.0:8100"}}
    assert listen_address(None, tables, "127.0.0.1:7000") == "0.0.0.0:8100"
    assert listen_address("127.0.0.1:1", tables, "127.0.0.1:7000") == "127.0.0.1:1"
    assert listen_address(None, {}, "127.0.0.1:7000") == "127.0.0.1:7000"
    with pytest.raises(ConfigError, match=r"router\.listen must be HOST:PORT, got 'here'"):
        listen_address(None, {"router": {"listen": "here"}}, "127.0.0.1:7000")


def test_free_memory_is_divided(tmp_path: Path) -> None:
    """0.8 of 10000 MiB, less two pools' weights of 100 and three processes of 384, between three:
    2216 MiB each."""
    memory = HostMemory(20000 * MIB, 10000 * MIB)
    flags = memory_flags(shapes(decode_pp=2), {}, model(tmp_path / "model"), memory)
    assert flags == {"prefill": ("--memory-mb", "2216"), "decode": ("--memory-mb", "2216")}


@pytest.mark.parametrize(
    ("own", "tables"),
    [
        (("--memory-mb", "64"), {}),
        (("--memory-share", "0.1"), {}),
        ((), {"prefill": {"num_pages": 8}, "decode": {"memory_mb": 7}}),
    ],
)
def test_an_explicit_memory_size_is_used(
    tmp_path: Path, own: tuple[str, ...], tables: Tables
) -> None:
    flags = memory_flags(
        shapes(flags=own), tables, model(tmp_path / "model"), HostMemory(20000 * MIB, 10000 * MIB)
    )
    assert flags == {"prefill": (), "decode": ()}


def test_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    memory, folder = HostMemory(20000 * MIB, 1000 * MIB), model(tmp_path / "model")
    with pytest.raises(
        ConfigError,
        match=r"--memory-mb: 1 \* 6700 MiB \(prefill\) \+ 2 \* 6700 MiB \(decode\) is 20100 MiB, "
        "and this machine has 20000 MiB",
    ):
        memory_flags(shapes(decode_pp=2, flags=("--memory-mb", "6700")), {}, folder, memory)
    with pytest.raises(ConfigError, match="20001 MiB"):
        memory_flags(shapes(), {"decode": {"memory_mb": 20001}}, folder, memory)
    # Roles report a value that is no number.
    assert memory_flags(shapes(flags=("--memory-mb", "many")), {}, folder, memory)


def test_workers_of_one_device_divide_it(tmp_path: Path) -> None:
    flags = memory_flags(
        shapes(decode=2, flags=("--device", "cuda")), {}, model(tmp_path / "model")
    )
    assert flags == dict.fromkeys(("prefill", "decode"), ("--memory-share", "0.283"))


def test_models_that_do_not_fit_are_refused_with_the_sum(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"3 pools of large take 3 \* 4000 MiB = 12000 MiB for weights alone, and "
        r"10000 of 20000 MiB are free on this machine",
    ):
        memory_flags(
            shapes(prefill=2),
            {},
            model(tmp_path / "large", 4000),
            HostMemory(20000 * MIB, 10000 * MIB),
        )


def test_a_busy_machine_leaves_each_a_little(tmp_path: Path) -> None:
    """0.8 of 1220 MiB, less two pools' weights of 100 and two processes of 384, is 8 MiB; of 1200
    it is -8."""
    folder = model(tmp_path / "model")
    flags = memory_flags(shapes(), {}, folder, HostMemory(20000 * MIB, 1220 * MIB))
    assert flags["prefill"] == ("--memory-mb", "64")
    busier = HostMemory(20000 * MIB, 1200 * MIB)
    with pytest.raises(
        ConfigError,
        match=r"no memory is left for caches: 0\.8 of the 1200 MiB .* 2 \* 100 MiB of "
        r"weights and 2 \* 384 MiB of processes, is -8 MiB: use fewer pools",
    ) as refused:
        memory_flags(shapes(), {}, folder, busier)
    assert refused.value.field == "memory_mb"
    assert memory_flags(shapes(flags=("--memory-mb", "8")), {}, folder, busier) == {
        "prefill": (),
        "decode": (),
    }


@pytest.mark.parametrize(
    ("http", "listen", "fits"),
    [
        ("127.0.0.1:7000", "127.0.0.1:7000", False),
        ("0.0.0.0:7000", "127.0.0.1:7000", False),
        ("localhost:7000", "127.0.0.1:7000", False),
        ("127.0.0.1:7000", "[::]:7000", False),
        ("127.0.0.1:7001", "127.0.0.1:7000", True),
        ("127.0.0.1:0", "127.0.0.1:0", True),
        ("127.0.0.1:7000", "127.0.0.2:7000", True),
    ],
)
def test_http_takes_another_address_than_the_router(http: str, listen: str, *, fits: bool) -> None:
    with (
        nullcontext()
        if fits
        else pytest.raises(ConfigError, match=r"^--http .* the router listens there")
    ):
        check_apart(parse_address(http), parse_address(listen))


ALL_TLS: Tables = {
    role: {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
    for role in ("router", "prefill", "decode")
}


def test_tls_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Else processes that serve are asked in vain whether they do."""
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    trusts_only = client_security(tls_ca=tmp_path / "ca.pem")
    shows_own = ChannelSecurity(authority.store(tmp_path / "operator", "operator"))
    no_flags = dict.fromkeys(ALL_TLS, ())
    check_tls({}, no_flags, PLAIN_CHANNEL)
    check_tls(ALL_TLS, no_flags, shows_own)
    check_tls({}, dict.fromkeys(ALL_TLS, ("--tls-cert", "c")), shows_own)
    own = tmp_path / "own.toml"
    own.write_text("\n".join(f'[{role}]\ntls_cert = "c"' for role in ALL_TLS))
    check_tls({}, dict.fromkeys(ALL_TLS, ("--config", str(own))), shows_own)
    without_decode = {role: table for role, table in ALL_TLS.items() if role != "decode"}
    refused: list[tuple[Tables, ChannelSecurity, str]] = [
        (
            ALL_TLS,
            PLAIN_CHANNEL,
            "--tls-ca is missing: the settings file enables TLS",
        ),
        (
            ALL_TLS,
            trusts_only,
            "--tls-cert is missing: the settings file enables TLS",
        ),
        (
            {},
            shows_own,
            "--tls-ca was given (or BATON_TLS_CA is set), and no role has tls_cert: remove it",
        ),
        (
            without_decode,
            shows_own,
            "decode.tls_cert is missing: [router] has one, and either all roles use TLS",
        ),
    ]
    for tables, security, says in refused:
        with pytest.raises(ConfigError) as error:
            check_tls(tables, no_flags, security)
        assert str(error.value).startswith(says)


def test_free_ports_are_different_ones() -> None:
    """The kernel offers a port again as soon as its probe is closed."""
    assert len(set(free_ports("127.0.0.1", 200))) == 200
    assert free_ports("127.0.0.1", 0) == []
