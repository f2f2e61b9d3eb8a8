"""Which layers a stage's process plans for when a draft sits behind the target (S0-8)."""

from pathlib import Path

import pytest

from engine.stages import get_pp_indices
from pool.config import WorkerConfig
from pool.stage import plan_stage
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle import save_draft

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plan")
    return make_checkpoint(folder, "qwen3_5_text"), save_draft(folder / "eagle3", layers=(0, 1, 3))


@pytest.mark.parametrize(("size", "partition"), [(1, ""), (2, ""), (3, ""), (4, ""), (3, "1,1,2")])
def test_a_draft_has_its_own_layers_from_zero_under_any_split_s0_8(folders: tuple[Path, Path], size: int,
                                                                   partition: str) -> None:
    """The split of the target neither moves nor shortens them; counted together, they follow the target's."""
    model, draft = folders
    for rank in range(size):
        config = WorkerConfig(model=model, draft=draft, spec_prompt=True, rank=rank, world_size=size,
                              partition=partition, num_pages=8)
        plan = plan_stage(config, speculates=True)
        assert plan.speculation is not None
        assert {spec.layer_id for spec in plan.speculation.draft.cache_specs(config.page_size)} == {0}
        expected = get_pp_indices(NUM_LAYERS, rank, size, partition or None)
        assert plan.model_layers == expected
        behind = set(plan.geometry.layers) - set(expected)
        assert behind == ({NUM_LAYERS} if rank == size - 1 else set())
        drafted = [spec for spec in plan.geometry.local_specs() if spec.layer_id not in expected]
        assert {spec.layer_id for spec in drafted} == behind
        assert all(spec.of_draft for spec in drafted)
