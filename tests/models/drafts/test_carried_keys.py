"""One choice of keys for all steps of a round (S2-7), and what a round begins with (S2-10)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.latent import CpuLatentAttention
from engine.contracts.latent import LatentGeometry
from engine.contracts.model import ForwardContext, StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.draft_trees import CarriedKeys, SpecRow, TokenTree
from engine.core.numerics import Numerics
from engine.core.request import SampledToken, SamplingParams
from engine.core.rows import Row, build_batch
from engine.memory.layout import CacheKind
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.attention.multistep_latent import MultiStepLatentAttention
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.eagle import EagleDrafter
from models.drafts.loader import DraftDescription, read_draft
from models.loader import read_model
from tests.support.drafts.nextn import nan_pools
from tests.support.models.checkpoints import add_nextn, make_checkpoint
from tests.support.models.tiny_models import HIDDEN_SIZE

LAST, STEPS = 5, 5
PROMPTS = [
    torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (37, 12)
]
FEATURES = torch.randn(49, HIDDEN_SIZE, generator=torch.Generator().manual_seed(5))
PAGES = ([3, 5, 2], [7, 1])


class Choosing(CpuLatentAttention):
    num_choices = 0

    def select(
        self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Tensor:
        self.num_choices += 1
        return super().select(layer_id, q, k, weights, batch)


class ChoosingSteps(MultiStepLatentAttention):
    num_choices = 0

    def select(
        self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Tensor:
        self.num_choices += 1
        return super().select(layer_id, q, k, weights, batch)


@dataclass
class Bench:
    """A NextN draft with its backends exposed."""

    model: DraftModel
    paged: Choosing
    steps: ChoosingSteps

    @classmethod
    def of(cls, draft: DraftDescription) -> "Bench":
        model = draft.load(numerics=Numerics.EXACT)
        pools, geometry = nan_pools(model, 16, 10), model.attention_geometry(16)
        assert isinstance(geometry, LatentGeometry)
        latent, index = pools[CacheKind.LATENT], pools[CacheKind.INDEX_KEY]
        return cls(
            model,
            Choosing(latent_pools=latent, index_pools=index, geometry=geometry),
            ChoosingSteps(latent_pools=latent, index_pools=index, geometry=geometry),
        )

    @property
    def attention(self) -> DraftAttention:
        return DraftAttention.over_latents(self.paged, self.steps, 16)

    def propose(
        self, *, topk: int, model: DraftModel | None = None, pages: tuple[list[int], ...] = PAGES
    ) -> list[TokenTree]:
        """Propose after both prompts."""
        drafter = EagleDrafter(
            model=model or self.model, attention=self.attention, topk=topk, steps=STEPS
        )
        batch = build_batch(
            ForwardMode.PREFILL,
            [
                Row(
                    key,
                    prompt,
                    0,
                    table,
                    0,
                    SamplingRow(SamplingParams(), 0),
                    SpecRow(num_draft_tokens=STEPS),
                )
                for key, (prompt, table) in enumerate(zip(PROMPTS, pages, strict=True))
            ],
        )
        runs = [AcceptedRun(row, [0], [SampledToken(7 + row)]) for row in range(2)]
        return drafter.propose(batch, StageOutput(aux_hidden={LAST: FEATURES}), runs)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DraftDescription]:
    """Return a maker of GLM-5's draft with these fields in its config."""
    folder, count = tmp_path_factory.mktemp("nextn"), iter(range(100))

    def make(**fields: object) -> DraftDescription:
        path = add_nextn(
            make_checkpoint(folder, "glm_moe_dsa"), folder / f"nextn-{next(count)}", **fields
        )
        return read_draft(path, read_model(path))

    return make


Maker = Callable[..., DraftDescription]


@pytest.mark.parametrize(
    ("shares", "topk", "num_choices"), [(True, 1, 0), (False, 1, 4), (True, 4, 4), (False, 4, 4)]
)
def test_s2_7_only_chains_of_a_model_with_sharing_share(
    draft: Maker, *, shares: bool, topk: int, num_choices: int
) -> None:
    """A round of five levels takes four steps; the choice it begins with was made where the draft
    followed."""
    bench = Bench.of(draft(index_share_for_mtp_iteration=shares))
    for round_number in (1, 2):
        bench.propose(topk=topk)
        assert (bench.paged.num_choices, bench.steps.num_choices) == (
            round_number,
            round_number * num_choices,
        )


def round_batch() -> ForwardBatch:
    batch = build_batch(
        ForwardMode.DRAFT,
        [
            Row(key, [9], len(prompt), table, 0, None)
            for key, (prompt, table) in enumerate(zip(PROMPTS, PAGES, strict=True))
        ],
    )
    batch.spec_info = CarriedKeys()
    return batch


@pytest.mark.parametrize(("shares", "num_choices"), [(True, 1), (False, 3)])
def test_s2_7_the_first_step_chooses_without_carried_keys(
    draft: Maker, *, shares: bool, num_choices: int
) -> None:
    bench = Bench.of(draft(index_share_for_mtp_iteration=shares))
    bench.propose(topk=1)
    before, batch = bench.steps.num_choices, round_batch()
    bench.steps.plan(batch)
    context = bench.attention.in_round
    for _ in range(3):
        bench.model.forward(batch, FEATURES[:2], context)
    assert bench.steps.num_choices - before == num_choices


def test_s2_7_reuse_equals_recompute_while_every_key_is_chosen(draft: Maker) -> None:
    shared, anew = (
        Bench.of(draft(index_topk=64, index_share_for_mtp_iteration=shares))
        for shares in (True, False)
    )
    assert shared.propose(topk=1) == anew.propose(topk=1)
    narrow = Bench.of(draft(index_share_for_mtp_iteration=True))
    assert narrow.propose(topk=1) != shared.propose(topk=1), "here the choice matters"


class Failing:
    """A draft that fails at its third forward, the second step of the round."""

    def __init__(self, model: DraftModel) -> None:
        self._model, self._calls = model, 0
        self.capture_layers, self.vocab_size = model.capture_layers, model.vocab_size
        self.attention_geometry, self.cache_specs = model.attention_geometry, model.cache_specs
        self.logits, self.target_ids = model.logits, model.target_ids

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        return self._model.features(aux_hidden, tokens)

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        self._calls += 1
        if self._calls == 3:
            raise RuntimeError("the device is gone")
        return self._model.forward(batch, hidden, context)


def test_s2_7_a_round_that_fails_leaves_nothing_carried(draft: Maker) -> None:
    description = draft(index_share_for_mtp_iteration=True)
    bench, fresh = Bench.of(description), Bench.of(description)
    with pytest.raises(RuntimeError, match="the device is gone"):
        bench.propose(topk=1, model=Failing(bench.model))
    assert bench.propose(topk=1) == fresh.propose(topk=1)
    assert bench.paged.num_choices == 2


def test_s2_10_a_seed_row_may_be_short_and_counts_keys_not_slots(draft: Maker) -> None:
    """Rows with fewer keys are filled up with -1; the same prompts on other pages begin with the
    same row."""
    description = draft(index_share_for_mtp_iteration=True)
    seeds = torch.tensor([[0, -1, -1], [4, 9, 11]], dtype=torch.int32)
    taken = CarriedKeys.chosen_by(seeds).selected
    assert taken is not None
    assert taken.tolist() == seeds.tolist()
    assert Bench.of(description).propose(topk=1) == Bench.of(description).propose(
        topk=1, pages=([9, 4, 6], [8, 2])
    )


def test_s2_10_one_row_without_a_key_makes_the_round_choose_again(draft: Maker) -> None:
    assert (
        CarriedKeys.chosen_by(torch.tensor([[4, 9, 11], [-1, -1, -1]], dtype=torch.int32)).selected
        is None
    )
    assert CarriedKeys.chosen_by(None).selected is None
    bench = Bench.of(draft(index_share_for_mtp_iteration=True))
    bench.propose(topk=1)
    carried = CarriedKeys.chosen_by(torch.full((2, 8), -1, dtype=torch.int32))
    batch = round_batch()
    batch.spec_info = carried
    bench.steps.plan(batch)
    bench.model.forward(batch, FEATURES[:2], bench.attention.in_round)
    assert bench.steps.num_choices == 1
    assert carried.selected is not None
