"""Settings of the planner: the service level, and errors that name their field."""

import pytest

from baton.load import Slo
from planner.config import PlannerConfig
from runtime.config import load
from runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "promise"),
    [
        ("ttft=2s,tpot=50ms", Slo(2.0, 0.05)),
        ("tpot=0.1s, ttft=300ms", Slo(0.3, 0.1)),
    ],
)
def test_a_service_level_is_read(text: str, promise: Slo) -> None:
    assert Slo.parse(text) == promise


@pytest.mark.parametrize(
    "text", ["", "ttft=2s", "ttft=0s,tpot=1ms", "ttft=-1s,tpot=1ms", "ttft=nan,tpot=1ms", "x=1s"]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="slo: must be like ttft=2s,tpot=50ms"):
        load(PlannerConfig, section="planner", flags={"router": ("a:1",), "slo": text}, file=None)


@pytest.mark.parametrize("routers", [(), ("nowhere",), ("a:0",)])
def test_routers_are_required(routers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="router"):
        load(PlannerConfig, section="planner", flags={"router": routers}, file=None)
