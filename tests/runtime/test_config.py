from pathlib import Path

import pytest
from pydantic import Field

from runtime.config import (
    AddressField,
    Config,
    describe,
    leader_from_environment,
    load,
    parse_address,
    parse_peer,
)
from runtime.errors import ConfigError


class Sample(Config):
    model: Path
    listen: AddressField = "127.0.0.1:0"
    num_pages: int = 64
    wait_s: float = 1.0


class Targets(Sample):
    all_targets: tuple[str, ...] = Field(min_length=1)


def test_flags_beat_the_file_and_the_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('[prefill]\nnum_pages = 8\nlisten = "127.0.0.1:7"\n[decode]\nnum_pages = 9\n')
    flags = {"model": "here", "num_pages": 16, "listen": None}
    config = load(Sample, section="prefill", flags=flags, file=file)
    assert config == Sample(model=Path("here"), listen="127.0.0.1:7", num_pages=16)
    assert describe(config) == {
        "model": "here",
        "listen": "127.0.0.1:7",
        "num_pages": 16,
        "wait_s": 1.0,
    }


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("[prefill]\nnum_page = 8\n", "num_page", r"unknown setting; did you mean num_pages\?$"),
        ("[prefill]\nnum-pages = 8\n", "num-pages", r"did you mean num_pages\?$"),
        ("[prefill]\ncolor = 8\n", "color", "unknown setting$"),
        ("[decoder]\nnum_pages = 8\n", "decoder", r"did you mean decode\?$"),
        ("[prefill]\nnum_pages = 'many'\n", "num_pages", "many"),
        ("[prefil]\nnum_pages = 8\n", "prefil", "router, prefill, decode"),
        (
            "[prefill]\nlisten = 'nowhere'\n",
            "listen",
            "^prefill.listen: address must be HOST:PORT, got 'nowhere'$",
        ),
        ("num_pages = 8\n", "num_pages", "tables"),
        ("prefill = 1\n", "prefill", r"prefill must be a table, \[prefill\], got 1$"),
        ("[prefill]\nwait_s = inf\n", "wait_s", r"finite number \(got inf\)$"),
        ("not toml", "config", "not TOML"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, text: str, field: str, says: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load(Sample, section="prefill", flags={"model": "here"}, file=file)
    assert caught.value.field == field


def test_missing_values_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^--model must be given, or set in the table \[prefill\] of --config$"
    ):
        load(Sample, section="prefill", flags={})
    with pytest.raises(ConfigError, match=r"^--model, --all-targets must be given, or") as missing:
        load(Targets, section="prefill", flags={"all_targets": ()})
    assert missing.value.field == "model"
    with pytest.raises(ConfigError, match="absent"):
        load(Sample, section="prefill", flags={}, file=tmp_path / "absent")


def test_a_server_to_call_has_a_port() -> None:
    assert str(parse_peer("host:1", field="target")) == "host:1"
    with pytest.raises(
        ConfigError, match=r"^target must end in a port from 1 to 65535, got 'host:0'$"
    ):
        parse_peer("host:0", field="target")


def test_config_cannot_be_written() -> None:
    config = Sample(model=Path("here"))
    with pytest.raises(ValueError, match="frozen"):
        config.num_pages = 1


@pytest.mark.parametrize(
    "text",
    [
        "h",
        "h:",
        ":1",
        "h:x",
        "h:65536",
        "a:b:1",
        "h:-1",
        "[::1",
        "[::1:1",
        "::1]:1",
        "[]:1",
        "[[::1]]:1",
        "a]:1",
    ],
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="leader"):
        parse_address(text, field="leader")


def test_good_addresses() -> None:
    assert str(parse_address("[::1]:80")) == "[::1]:80"
    assert str(parse_address("host.name:0")) == "host.name:0"
    assert leader_from_environment({"MASTER_ADDR": "a", "MASTER_PORT": "1"}) == "a:1"
    assert leader_from_environment({"MASTER_ADDR": "a"}) is None
    assert leader_from_environment({"MASTER_ADDR": "a", "MASTER_PORT": ""}) is None
    for host in ("fd00::1", "[fd00::1]"):
        assert leader_from_environment({"MASTER_ADDR": host, "MASTER_PORT": "1"}) == "[fd00::1]:1"
