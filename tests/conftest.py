"""What holds for the whole suite."""

from pathlib import Path

import pytest

_STARTS_PROCESSES = ("bench", "cluster", "deploy")


@pytest.hookimpl(tryfirst=True)  # before the workers read the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """When tests are spread over workers, those that start whole clusters stay on one: two clusters at a time would
    wait for each other's cores."""
    root = Path(__file__).parent
    for item in items:
        if item.path.relative_to(root).parts[0] in _STARTS_PROCESSES:
            item.add_marker(pytest.mark.xdist_group("processes"))
