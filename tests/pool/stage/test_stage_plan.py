"""Layers that a stage's process plans for if a draft follows the target (S0-8)."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from decode.worker import DecodeRole
from engine.core.layer_range import LayerRange, get_pp_indices
from engine.memory.layout import CacheKind
from models.weights_digest import PoolWeights
from pool.check import report
from pool.stage.config import WorkerConfig
from pool.stage.plan import StagePlan, plan_stage
from pool.stage.speculation_plan import DraftModelPlan
from prefill.worker import PrefillRole
from runtime.errors import ConfigError
from tests.support.drafts.eagle import save_draft
from tests.support.models.checkpoints import add_assistant, add_nextn, make_checkpoint

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plan")
    return make_checkpoint(folder, "qwen3_5_text"), save_draft(folder / "eagle3", layers=(0, 1, 3))


@pytest.mark.parametrize(("size", "partition"), [(1, ""), (3, ""), (3, "1,4,1")])
def test_a_nextn_draft_is_one_layer_of_both_its_caches_s0_8(
    tmp_path: Path, size: int, partition: str
) -> None:
    """Latents and index keys of the one layer after the target's last, on the last stage and in the
    handoff."""
    model = add_nextn(make_checkpoint(tmp_path, "glm_moe_dsa"), tmp_path / "nextn")
    for rank in range(size):
        plan = plan_stage(
            WorkerConfig(
                model=model,
                draft=model,
                spec_prompt=True,
                rank=rank,
                world_size=size,
                partition=partition,
                num_pages=8,
            ),
            speculates=rank % 2 == 0,
        )
        assert plan.speculation is not None
        expected = get_pp_indices(6, rank, size, partition or None)
        assert plan.model_layers == expected
        drafted = [
            spec.kind
            for spec in plan.geometry.local_specs()
            if spec.layer_id == 6 and spec.kind.is_paged
        ]
        assert drafted == ([CacheKind.LATENT, CacheKind.INDEX_KEY] if rank == size - 1 else [])
        assert plan.geometry.layers.end == expected.end + (rank == size - 1)
        for kind in ("latent", "index_key"):
            assert f"{kind} (64," in plan.compatibility(PoolWeights("0" * 32)).text


@pytest.mark.parametrize(("size", "partition"), [(1, ""), (2, ""), (3, ""), (4, ""), (3, "1,1,2")])
def test_a_draft_has_its_own_layers_from_zero_under_any_split_s0_8(
    folders: tuple[Path, Path], size: int, partition: str
) -> None:
    """The split of the target neither moves nor shortens them; counted together, they follow the
    target's."""
    model, draft = folders
    for rank in range(size):
        config = WorkerConfig(
            model=model,
            draft=draft,
            spec_prompt=True,
            rank=rank,
            world_size=size,
            partition=partition,
            num_pages=8,
        )
        plan = plan_stage(config, speculates=True)
        assert isinstance(plan.speculation, DraftModelPlan)
        assert {spec.layer_id for spec in plan.speculation.draft.cache_specs(config.page_size)} == {
            0
        }
        expected = get_pp_indices(NUM_LAYERS, rank, size, partition or None)
        assert plan.model_layers == expected
        behind = set(plan.geometry.layers) - set(expected)
        assert behind == ({NUM_LAYERS} if rank == size - 1 else set())
        drafted = [spec for spec in plan.geometry.local_specs() if spec.layer_id not in expected]
        assert {spec.layer_id for spec in drafted} == behind
        assert all(spec.of_draft for spec in drafted)


@pytest.mark.parametrize("partition", ["1,3", "3,1"])
def test_every_stage_counts_with_the_largest_share_s4_2(tmp_path: Path, partition: str) -> None:
    """The stage with more layers holds fewer pages; both take its count, by the arithmetic of this
    page size."""
    model = make_checkpoint(tmp_path, "llama")
    counts = []
    for rank in range(2):
        config = WorkerConfig(
            model=model,
            rank=rank,
            world_size=2,
            partition=partition,
            memory_mb=1,
            page_size=16,
            max_running=64,
        )
        counts.append(plan_stage(config).geometry.num_pages)
    page_bytes = 2 * 2 * 16 * 20 * 4  # keys and values, 2 kv heads of 20, tokens of a page, fp32
    assert counts == [(1 << 20) // (3 * page_bytes)] * 2


def test_states_of_verification_are_part_of_the_budget(folders: tuple[Path, Path]) -> None:
    """A slot is one state; each running request, and the null one, has one more for each node of a
    tree; a page is that of the target and of the draft."""
    model, draft = folders
    config = WorkerConfig(
        model=model,
        draft=draft,
        spec_prompt=False,
        memory_mb=7,
        page_size=64,
        max_running=16,
        spec_draft_tokens=7,
        spec_steps=7,
    )
    plan = plan_stage(config, speculates=True, max_held=48)
    geometry = plan.geometry
    state_bytes = sum(spec.record_bytes for spec in geometry.specs if not spec.kind.is_paged)
    draft_page = target_page = 2 * 2 * 64 * 32 * 4  # keys and values, 2 kv heads of 32, fp32
    assert (geometry.num_slots, plan.num_scratch) == (49, 17)
    assert geometry.num_pages == ((7 << 20) - (49 + 17 * 8) * state_bytes) // (
        target_page + draft_page
    )


@pytest.mark.parametrize(
    ("max_running", "max_landing", "held"), [(8, 0, 24), (33, 0, 33), (33, 7, 40)]
)
def test_s4_6_slots_cover_incoming_requests_and_tree_states_running_ones(
    folders: tuple[Path, Path], max_running: int, max_landing: int, held: int
) -> None:
    model, draft = folders
    config = WorkerConfig(
        model=model, draft=draft, num_pages=8, max_running=max_running, max_landing=max_landing
    )
    plan = plan_stage(config, max_held=DecodeRole().max_held(config), speculates=True)
    assert (plan.max_held, plan.geometry.num_slots, plan.num_scratch) == (
        held,
        held + 1,
        max_running + 1,
    )


@pytest.mark.parametrize("num_copies", [0, 1, 2])
def test_s4_6_cached_states_have_their_own_slots(
    folders: tuple[Path, Path], num_copies: int
) -> None:
    """Those of a prefix cache: none, as many as run, or (the default) twice as many."""
    config = WorkerConfig(
        model=folders[0],
        num_pages=8,
        prefix_cache=num_copies > 0,
        prefix_snapshots=16 if num_copies == 1 else 0,
    )
    plan = plan_stage(config, max_held=PrefillRole().max_held(config), keeps_states=True)
    assert plan.geometry.num_slots == 1 + 16 * (1 + num_copies)


@pytest.mark.parametrize(
    ("shares", "topk", "num_layers", "kept"),
    [(True, 1, 1, True), (True, 3, 1, False), (False, 1, 1, False), (True, 1, 2, False)],
)
def test_only_chains_of_a_draft_that_shares_its_choice_hand_keys_over_s2_7(
    tmp_path: Path, topk: int, num_layers: int, *, shares: bool, kept: bool
) -> None:
    """The branches of a tree change places between steps, and choose again. So does every layer of
    a draft that has several."""
    model = add_nextn(
        make_checkpoint(tmp_path, "glm_moe_dsa"),
        tmp_path / "nextn",
        index_share_for_mtp_iteration=shares,
        num_nextn_predict_layers=num_layers,
    )
    plan = plan_stage(
        WorkerConfig(
            model=model, draft=model, spec_topk=topk, spec_steps=2, spec_draft_tokens=2, num_pages=8
        ),
        speculates=True,
    )
    keys = [spec for spec in plan.geometry.specs if spec.kind is CacheKind.DRAFT_KEYS]
    assert [spec.record_shape for spec in keys] == [(8,)] * kept, "as many as a token attends to"


@pytest.mark.parametrize(
    ("page_size", "step"), [(16, 0), (64, 0), (128, 0), (48, 192), (100, 1600)]
)
def test_a_page_size_that_shares_little_of_a_hybrid_is_noticed(
    folders: tuple[Path, Path], page_size: int, step: int
) -> None:
    """Prompts go on where a page and the grid of 64 tokens between states end together."""
    config = WorkerConfig(model=folders[0], num_pages=8, page_size=page_size)
    notices = plan_stage(config, keeps_states=True).notices
    assert [f"multiples of {step} tokens" in notice for notice in notices] == [True] * (step > 0)
    assert not plan_stage(config).notices, "states come with their requests"
    assert not plan_stage(
        config.model_copy(update={"prefix_cache": False}), keeps_states=True
    ).notices
    told = [line for line in report(config) if line.startswith("as a prefill pool: prompts resume")]
    assert len(told) == (step > 0)


def test_experts_are_spread_over_all_ranks_of_a_stage(tmp_path: Path) -> None:
    experts, dense = make_checkpoint(tmp_path, "qwen3_moe"), make_checkpoint(tmp_path, "llama")

    def planned(model: Path, tp: int, ep: int) -> StagePlan:
        return plan_stage(WorkerConfig(model=model, world_size=2, tp=tp, ep=ep, num_pages=8))

    assert planned(experts, 2, 2).geometry == planned(experts, 2, 0).geometry
    with pytest.raises(
        ConfigError,
        match="--ep 2: experts are spread over all ranks of a stage, of which --tp gives it 1",
    ):
        planned(experts, 1, 2)
    with pytest.raises(ConfigError, match="--ep 2: LlamaForCausalLM has no experts"):
        planned(dense, 2, 2)


@pytest.mark.parametrize(
    ("shape", "field", "complaint"),
    [
        ((2, 3, 5), "spec_topk", "sliding windows verify chains only: spec_topk must be 1"),
        (
            (1, 16, 16),
            "spec_draft_tokens",
            "less than the page_size 16 for models with sliding windows, is 16",
        ),
    ],
)
def test_trees_that_windows_cannot_verify_are_refused(
    tmp_path: Path, shape: tuple[int, int, int], field: str, complaint: str
) -> None:
    model, (topk, steps, tokens) = make_checkpoint(tmp_path, "gemma4"), shape
    with pytest.raises(ConfigError, match=complaint) as caught:
        plan_stage(
            WorkerConfig(
                model=model,
                draft=model,
                num_pages=8,
                page_size=16,
                spec_topk=topk,
                spec_steps=steps,
                spec_draft_tokens=tokens,
            ),
            speculates=True,
        )
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("layout", "field", "complaint"),
    [
        (
            {"world_size": 2, "partition": "3,1"},
            "partition",
            "reads the caches of layers 2 and 3; the last stage has layers",
        ),
        ({"world_size": 2, "tp": 2}, "tp", "of which a rank has only a part"),
    ],
)
def test_a_draft_without_a_cache_finds_the_targets_on_the_last_stage(
    tmp_path: Path, layout: dict[str, object], field: str, complaint: str
) -> None:
    """And costs a prefill pool nothing."""
    model = make_checkpoint(tmp_path, "gemma4")
    config = WorkerConfig(model=model, draft=add_assistant(model, tmp_path / "draft"), num_pages=8)
    plan = plan_stage(config, speculates=True)
    assert plan.speculation is not None
    assert len(plan.geometry.specs) == plan.description.facts.num_layers
    assert plan_stage(config).speculation is None
    with pytest.raises(ConfigError, match=complaint) as caught:
        plan_stage(config.model_copy(update=layout), speculates=True)
    assert caught.value.field == field


@pytest.mark.parametrize("ties", [False, True], ids=["a head", "a tied head"])
@pytest.mark.parametrize(
    ("reads_prompts", "expected"),
    [(True, [(0, 2), (2, 4)]), (False, [(0, 3), (3, 4)])],
    ids=["prompts", "steps"],
)
def test_balanced_stages_count_the_head_if_each_token_needs_it(
    tmp_path: Path, expected: list[tuple[int, int]], *, reads_prompts: bool, ties: bool
) -> None:
    """It weighs two and a half layers; the embedding counts nowhere."""
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=1600,
            tie_word_embeddings=ties,
        )
    ).save_pretrained(tmp_path)
    for rank, (start, end) in enumerate(expected):
        config = WorkerConfig(
            model=tmp_path, rank=rank, world_size=2, partition="balanced", num_pages=8
        )
        assert plan_stage(config, reads_prompts=reads_prompts).model_layers == LayerRange(
            start, end
        )
