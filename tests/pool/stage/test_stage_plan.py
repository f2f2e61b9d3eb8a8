"""Which layers a stage's process plans for when a draft sits behind the target (S0-8)."""

from pathlib import Path

import pytest

from engine.core.layer_range import get_pp_indices
from engine.memory.layout import CacheKind
from models.weights_digest import PoolWeights
from pool.stage.config import WorkerConfig
from pool.stage.stage import plan_stage
from tests.support.checkpoints import add_nextn, make_checkpoint
from tests.support.eagle import save_draft

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plan")
    return make_checkpoint(folder, "qwen3_5_text"), save_draft(folder / "eagle3", layers=(0, 1, 3))


@pytest.mark.parametrize(("size", "partition"), [(1, ""), (3, ""), (3, "1,4,1")])
def test_a_nextn_draft_is_one_layer_of_both_its_caches_s0_8(tmp_path: Path, size: int, partition: str) -> None:
    """Latents and index keys of the one layer behind the target's last, on the last stage and in the handoff."""
    model = add_nextn(make_checkpoint(tmp_path, "glm_moe_dsa"), tmp_path / "nextn")
    for rank in range(size):
        plan = plan_stage(WorkerConfig(model=model, draft=model, spec_prompt=True, rank=rank, world_size=size,
                                       partition=partition, num_pages=8), speculates=rank % 2 == 0)
        assert plan.speculation is not None
        expected = get_pp_indices(6, rank, size, partition or None)
        assert plan.model_layers == expected
        drafted = [spec.kind for spec in plan.geometry.local_specs() if spec.layer_id == 6 and spec.kind.is_paged]
        assert drafted == ([CacheKind.LATENT, CacheKind.INDEX_KEY] if rank == size - 1 else [])
        assert plan.geometry.layers.end == expected.end + (rank == size - 1)
        for kind in ("latent", "index_key"):
            assert f"{kind} (64," in plan.compatibility(PoolWeights("0" * 32)).text


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
