"""EAGLE-3 on a decode pool: its trees are those of the formulas, and the output is that of plain
decoding."""

import itertools

import pytest
import torch

from decode.speculation import MAX_DRAFT_TOKENS, DraftLength
from engine.backends.cpu.attention import CpuAttention
from engine.contracts.attention import AttentionGeometry
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch
from engine.core.numerics import Numerics
from engine.pipeline.stage_executor import StageExecutor
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.attention.multistep import MultiStepAttention
from engine.speculative.attention.multistep_paged import PagedRounds
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.drafters.eagle import EagleDrafter
from engine.speculative.replay.recorded_drafts import RecordedDrafts
from models.drafts.loader import random_draft
from models.loader import ModelDescription
from tests.decode.test_speculation import assert_nothing_leaked, requests, shown
from tests.support.drafts import eagle
from tests.support.drafts.drafters import CHAINS, TREES, Shape
from tests.support.drafts.tree_oracle import CheckedDrafter
from tests.support.models.tiny_models import HYBRID, LLAMA, tiny
from tests.support.pool.local_pool import Answer, Speculation, local_pool

PAGE_SIZE = 16


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[HYBRID, LLAMA], ids=["hybrid", "llama"])
def description(request: pytest.FixtureRequest) -> ModelDescription:
    return tiny(request.param)


@pytest.fixture(scope="module")
def reference(description: ModelDescription) -> list[Answer]:
    torch.set_num_threads(1)
    with local_pool(description) as pool:
        return pool.generate(requests())


def eagle_drafter(
    model: DraftModel, shape: Shape, num_pages: int, *, is_recorded: bool = True
) -> EagleDrafter:
    (spec,) = model.cache_specs(PAGE_SIZE)
    pools = {0: torch.full((num_pages, *spec.record_shape), float("nan"))}
    geometry = model.attention_geometry(PAGE_SIZE)
    assert isinstance(geometry, AttentionGeometry)
    attention = DraftAttention.over_kv(
        CpuAttention(kv_pools=pools, geometry=geometry),
        MultiStepAttention(kv_pools=pools, geometry=geometry),
        geometry.page_size,
    )
    recorded = RecordedDrafts(
        model=model,
        attention=attention,
        rounds=PagedRounds(kv_pools=pools, geometry=geometry),
        topk=shape.width,
        steps=shape.depth,
        max_nodes=shape.nodes + 1,
        num_eager=0,
    )
    return EagleDrafter(
        model=model,
        attention=attention,
        topk=shape.width,
        steps=shape.depth,
        recorded=recorded if is_recorded else None,
    )


def speculation(
    description: ModelDescription,
    shape: Shape,
    made: list[CheckedDrafter],
    draft_length: DraftLength = lambda num_running: MAX_DRAFT_TOKENS,
    *,
    is_recorded: bool = True,
) -> Speculation:
    """Return a speculation that adds the drafter to `made` when the pool builds it."""
    model = random_draft(eagle.CONFIG, description, numerics=Numerics.EXACT)
    oracle = eagle.Eagle3Oracle(eagle.random_tensors(tied_head=description.spec.tied_head))

    def build(num_pages: int) -> CheckedDrafter:
        drafter = eagle_drafter(model, shape, num_pages, is_recorded=is_recorded)
        made.append(CheckedDrafter(drafter, oracle, shape))
        return made[-1]

    return Speculation(build, shape.nodes, model.capture_layers, draft_length)


def assert_trees_are_the_formulas(drafter: CheckedDrafter) -> None:
    assert drafter.num_trees > 8
    assert drafter.num_equal >= 0.9 * drafter.num_trees, (
        "but for scores that are equal up to rounding"
    )


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize(
    ("shape", "size"), [(CHAINS["chain 1"], 1), (CHAINS["chain 3"], 2), (TREES["tree 4x4/15"], 3)]
)
def test_trees_are_the_formulas(
    description: ModelDescription,
    reference: list[Answer],
    shape: Shape,
    size: int,
    *,
    is_recorded: bool,
) -> None:
    made: list[CheckedDrafter] = []
    with local_pool(
        description,
        size,
        chunk_tokens=64,
        speculation=speculation(description, shape, made, is_recorded=is_recorded),
    ) as pool:
        assert shown(pool.generate(requests())) == shown(reference)
        assert_nothing_leaked(pool)
    assert_trees_are_the_formulas(made[0])


def test_a_draft_that_lost_its_state_restarts(
    description: ModelDescription, reference: list[Answer]
) -> None:
    """Left out of the prompt, as after a handoff that brought no draft cache, and of some steps in
    between."""
    calls = itertools.count()

    def sometimes(num_running: int) -> int | None:
        number = next(calls)
        return None if number < 6 or number % 9 < 2 else MAX_DRAFT_TOKENS

    made: list[CheckedDrafter] = []
    shape = CHAINS["chain 3"]
    with local_pool(
        description, 2, speculation=speculation(description, shape, made, sometimes)
    ) as pool:
        assert shown(pool.generate(requests())) == shown(reference)
    assert_trees_are_the_formulas(made[0])


def test_preempted_requests_are_followed_again(description: ModelDescription) -> None:
    wanted, shape = requests(max_tokens=48), CHAINS["chain 3"]
    with local_pool(description) as pool:
        plain = pool.generate(wanted)
    made: list[CheckedDrafter] = []
    with local_pool(
        description, num_pages=24, speculation=speculation(description, shape, made)
    ) as pool:
        answers = pool.generate(wanted)
    assert shown(answers) == shown(plain)
    assert (
        sum(answer.finished.num_preemptions for answer in answers if answer.finished is not None)
        > 0
    )
    assert_trees_are_the_formulas(made[0])


@pytest.mark.parametrize("shape", [CHAINS["chain 5"], TREES["tree 4x4/15"]], ids=["chain", "tree"])
def test_s1_2_a_pool_plans_once_per_step_and_path(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage the target's forward, the last one also the draft's slots and all the steps of
    its round."""
    description, drafters, forwards = tiny(LLAMA), list[EagleDrafter](), list[StageExecutor]()
    model, run = random_draft(eagle.CONFIG, description, numerics=Numerics.EXACT), StageExecutor.run

    def counted(
        self: StageExecutor, batch: ForwardBatch, incoming: StageOutput | None = None
    ) -> StageOutput:
        forwards.append(self)
        return run(self, batch, incoming)

    def build(num_pages: int) -> EagleDrafter:
        drafters.append(eagle_drafter(model, shape, num_pages))
        return drafters[-1]

    monkeypatch.setattr(StageExecutor, "run", counted)
    with local_pool(
        description, 2, speculation=Speculation(build, shape.nodes, model.capture_layers)
    ) as pool:
        pool.generate(requests(12))
    (drafter,) = drafters
    first, last = dict.fromkeys(forwards)
    for executor in (first, last):
        assert executor.num_plans == forwards.count(executor) > 10
    assert drafter.num_plans["draft_extend"] == forwards.count(last)
    assert 10 < drafter.num_plans["draft_round"] <= forwards.count(last)
