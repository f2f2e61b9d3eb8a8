"""A prompt prefilled by one pool and continued by another gives the bits of one process, for any
division of the two.

{dense, MoE, hybrid, DSA} x {prefill layouts} x {decode layouts} x {no draft, chain, tree}, where a
layout is stages x ranks x data ranks: 120 points, in which any two values of different factors
meet. Experts are spread over the ranks of a stage wherever there are several (`--ep`): they are all
on one rank at `tp` 1, and divided at 2 and 4. What a pool refuses is no layout of the grid.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import pytest
import torch

from engine.core.layer_range import Placement
from engine.core.request import Request, SampledToken, SamplingParams
from models.loader import ModelDescription
from runtime.errors import ConfigError
from tests.support.covering import all_pairs, covering, pairs_of
from tests.support.drafts.drafters import OracleDrafter, Shape
from tests.support.models.tiny_models import GLM4_MOE, GLM_DSA, HYBRID_MOE, QWEN3, tiny
from tests.support.pool.local_pool import Speculation, local_pool
from tests.support.pool.pool_pair import Layout, pool_pair

MODELS = {
    "dense": (QWEN3, "bfloat16"),
    "moe": (GLM4_MOE, "bfloat16"),
    "hybrid": ({**HYBRID_MOE, "linear_num_key_heads": 4}, "float32"),
    "dsa": (GLM_DSA, "float32"),
}
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
UNEVEN: dict[str, tuple[dict[str, object], str]] = {
    "nine heads": ({**QWEN3, **NINE_HEADS}, "bfloat16"),
    "six served": (
        {**HYBRID_MOE, **NINE_HEADS, "linear_num_key_heads": 3, "linear_num_value_heads": 6},
        "float32",
    ),
    "five latent": ({**GLM_DSA, "num_attention_heads": 5}, "float32"),
}
ALL_LAYOUTS = [Layout(pp, tp, dp) for pp, tp, dp in product((1, 2), (1, 2, 4), (1, 2))]
REFUSED = [layout for layout in ALL_LAYOUTS if layout.dp > layout.tp]
LAYOUTS = [layout for layout in ALL_LAYOUTS if layout not in REFUSED]
DRAFTS = {"none": None, "chain": Shape(1, 3, 3), "tree": Shape(3, 3, 7)}
FACTORS: tuple[Sequence[object], ...] = (list(MODELS), LAYOUTS, LAYOUTS, list(DRAFTS))
POINTS = covering(FACTORS, at_least=120)
LENGTHS = (
    (5, 0.0),
    (90, 0.8),
    (33, 0.0),
    (64, 0.8),
)  # of prompts, and their sampling temperature


def requests() -> list[Request]:
    rng = random.Random(3)
    return [
        Request(
            f"r{length}",
            tuple(rng.randrange(3, 250) for _ in range(length)),
            7,
            SamplingParams(temperature=temperature, seed=length),
            num_top_logprobs=3,
        )
        for length, temperature in LENGTHS
    ]


@cache
def described(model: str) -> ModelDescription:
    torch.set_num_threads(1)
    return tiny(*{**MODELS, **UNEVEN}[model])


@cache
def expected(model: str) -> list[list[SampledToken]]:
    """Return the output of one process."""
    with local_pool(described(model)) as pool:
        return [answer.tokens for answer in pool.generate(requests())]


@dataclass
class Drafting:
    """Drafters that are mostly right, one for each sampling rank."""

    model: str
    shape: Shape
    drafters: list[OracleDrafter] = field(default_factory=list)

    def build(self, num_pages: int) -> OracleDrafter:
        """Build the pools; keys of requests count from 1."""
        truth = {
            key: [*request.prompt_token_ids, *(token.token_id for token in tokens)]
            for key, (request, tokens) in enumerate(
                zip(requests(), expected(self.model), strict=True), start=1
            )
        }
        self.drafters.append(OracleDrafter(self.shape, truth, error_rate=0.2))
        return self.drafters[-1]


def test_the_points_have_every_pair() -> None:
    assert len(POINTS) == len(set(POINTS)) >= 120
    assert {pair for point in POINTS for pair in pairs_of(point)} == all_pairs(FACTORS)


@pytest.mark.parametrize("layout", REFUSED, ids=str)
def test_layouts_outside_the_grid_are_refused_by_name(layout: Layout) -> None:
    with pytest.raises(
        ConfigError, match=r"1 ranks \(--tp\) do not form 2 equal groups \(--dp-attention\)"
    ):
        Placement.of(0, layout.pp * layout.tp, layout.tp, layout.dp)


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "draft"),
    [
        ("nine heads", Layout(1, 3, 1), Layout(2, 1, 1), "chain"),
        ("nine heads", Layout(1, 2, 1), Layout(1, 6, 3), "none"),
        ("nine heads", Layout(1, 2, 1), Layout(2, 3, 1), "chain"),
        ("six served", Layout(1, 3, 1), Layout(1, 2, 1), "tree"),
        ("six served", Layout(2, 2, 1), Layout(1, 1, 1), "tree"),
        ("six served", Layout(1, 1, 1), Layout(1, 2, 1), "tree"),
        ("five latent", Layout(1, 3, 1), Layout(1, 4, 1), "none"),
    ],
)
def test_uneven_divisions_give_the_bits_of_one_process(
    model: str, prefill: Layout, decode: Layout, draft: str
) -> None:
    check_division(model, prefill, decode, draft)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "prefill", "decode", "draft"),
    POINTS,
    ids=[
        "-".join(
            "x".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in point
        )
        for point in POINTS
    ],
)
def test_every_division_gives_the_bits_of_one_process(
    model: str, prefill: Layout, decode: Layout, draft: str
) -> None:
    check_division(model, prefill, decode, draft)


def check_division(model: str, prefill: Layout, decode: Layout, draft: str) -> None:
    shape = DRAFTS[draft]
    drafting = None if shape is None else Drafting(model, shape)
    speculation = None if drafting is None else Speculation(drafting.build, drafting.shape.nodes)
    with pool_pair(described(model), prefill, decode, speculation) as pools:
        assert pools.generate(requests()) == expected(model)
    assert drafting is None or all(sum(drafter.accepted) for drafter in drafting.drafters)
