"""The file of weights and quotas."""

from pathlib import Path

import pytest

from router.request.client_limits import OTHERS, RELOAD_S, ClientLimits, ClientTables, LimitsFile
from runtime.clock import ManualClock
from runtime.errors import ConfigError
from runtime.security.access import Caller

TEXT = b"""
["*"]
requests_per_minute = 600

[alice]
weight = 4

[bob]
concurrent_requests = 3
"""


def parsed(text: bytes) -> ClientTables:
    return ClientTables.parse({"client_limits": text})


def test_the_first_table_that_names_the_caller_counts() -> None:
    tables = parsed(TEXT)
    alice = tables.of(Caller(names=frozenset({"bob", "alice"})))
    assert (alice.name, alice.limits) == ("alice", ClientLimits(weight=4))
    other = tables.of(Caller(names=frozenset({"carol"})))
    assert (other.name, other.limits) == (OTHERS, ClientLimits(requests_per_minute=600))
    assert parsed(b"").of(Caller()).limits == ClientLimits()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[alice", "the file is not TOML"),
        (b"\xff", "the file is not TOML"),
        (b"[alice]\nwieght = 1", r"alice\.wieght: Extra inputs are not permitted"),
        (b"[alice]\nweight = 0", r"alice\.weight: Input should be greater than or equal to 0\.01"),
        (b"alice = 1", "alice: Input should be a valid dictionary"),
        (b"".join(b"[c%d]\n" % number for number in range(257)), "257 tables, the limit is 256"),
    ],
)
def test_an_invalid_file_is_refused_by_name(text: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^client_limits: .*{says}"):
        parsed(text)


def test_a_replaced_file_takes_effect_unless_it_is_invalid(tmp_path: Path) -> None:
    path = tmp_path / "clients.toml"
    path.write_bytes(TEXT)
    clock = ManualClock()
    limits = LimitsFile(path, clock)
    alice = Caller(names=frozenset({"alice"}))
    for text, weight in ((b"[alice]\nweight = 2", 2), (b"[alice]\nweight = 0", 2)):
        new = tmp_path / "new"
        new.write_bytes(text)
        new.rename(path)
        clock.advance(RELOAD_S)
        assert limits.of(alice).limits.weight == weight
