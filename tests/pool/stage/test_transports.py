"""The kinds of transport that the settings name."""

from typing import get_args

from pool.stage.config import TransportName
from pool.stage.transports import TRANSPORTS


def test_every_transport_has_a_name_in_the_settings() -> None:
    assert get_args(TransportName) == tuple(TRANSPORTS)


def test_only_one_kind_reaches_the_memory_of_devices() -> None:
    assert [name for name, kind in TRANSPORTS.items() if kind.reaches_devices] == ["cuda"]
