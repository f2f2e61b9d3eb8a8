"""The layout that `baton up` chooses where two copies of the weights do not fit."""

from pathlib import Path

import pytest

from baton.cluster_config import ClusterConfig
from runtime.process.host_memory import HostMemory
from tests.baton.test_preflight import MIB, model


def memory(free_mib: int) -> HostMemory:
    return HostMemory(20_000 * MIB, free_mib * MIB)


@pytest.mark.parametrize(
    ("free_mib", "is_aggregated"),
    [(9_900, False), (9_600, True), (4_900, True), (4_800, False)],
    ids=["room for two", "room for one", "just for one", "for none"],
)
def test_one_pool_of_both_roles_replaces_two_without_room(
    tmp_path: Path,
    free_mib: int,
    is_aggregated: bool,  # noqa: FBT001 - what is expected
) -> None:
    """Weights take 3,500 MiB, a process 384: two pools need 7,768 / 0.8 MiB, one 3,884 / 0.8."""
    config = ClusterConfig(model=model(tmp_path / "m", weights_mib=3_500))
    fitted = config.fitted(memory(free_mib))
    assert fitted.aggregated is is_aggregated
    assert (fitted is config) is not is_aggregated
    assert [shape.role for shape in fitted.shapes] == (
        ["worker"] if is_aggregated else ["prefill", "decode"]
    )


@pytest.mark.parametrize(
    "given",
    [
        {"decode": 2},
        {"prefill_pp": 2},
        {"memory_mb": 64},
        {"worker": 1},
        {"worker_flags": ("--device", "cuda")},
    ],
    ids=str,
)
def test_a_layout_that_was_asked_for_is_kept(tmp_path: Path, given: dict[str, object]) -> None:
    config = ClusterConfig.model_validate(
        {"model": model(tmp_path / "m", weights_mib=3_500), **given}
    )
    assert config.fitted(memory(5_000)) is config
