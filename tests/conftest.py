"""What holds for the whole suite."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_STARTS_PROCESSES = ("tests/bench/", "tests/cluster/", "tests/deploy/")


class _OneWorkerForClusters(LoadScopeScheduling):  # type: ignore[misc]  # published without types
    """Any worker takes any test, but those that start whole clusters stay on one: two clusters at a time would wait for
    each other's cores."""

    def _split_scope(self, nodeid: str) -> str:
        return "processes" if nodeid.startswith(_STARTS_PROCESSES) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _OneWorkerForClusters(config, log)
