"""Speculation through whole clusters: bit for bit the output of one process without any.

The whole grid is {chain 1, 3, 5, tree 4x4/15, 8x5/31} x {greedy, seeded sampling with penalties} x
prefill PP {1, 2} x decode PP {1, 2, 3} x batch {1, 5} x {trained draft, random draft}: 240 cells,
too many for every run. Here each cell asks both kinds of sampling, alone and five at once; of the
other four axes ten cells are sampled in which every pair of values of two axes occurs, but for
shape and decode PP, whose pairs are all in tests/decode/test_speculation.py, with a draft that is
always right. That draft's handoff is in tests/pool/test_draft_handoff.py.
"""

import asyncio
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from baton.cluster_config import demo_model
from demo.corpus import speculation_prompts
from engine.core.request import Request
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.drafts.drafters import CHAINS, TREES
from tests.support.grids import mostly_long

SHAPES = {**CHAINS, **TREES}
CELLS = [  # shape, prefill PP, decode PP, draft
    ("chain 1", 1, 3, "trained"),
    ("chain 1", 2, 1, "random"),
    ("chain 3", 1, 1, "random"),
    ("chain 3", 2, 2, "trained"),
    ("chain 5", 1, 3, "random"),
    ("chain 5", 2, 1, "trained"),
    ("tree 4x4/15", 1, 2, "trained"),
    ("tree 4x4/15", 2, 3, "random"),
    ("tree 8x5/31", 1, 2, "random"),
    ("tree 8x5/31", 2, 3, "trained"),
]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the shipped draft and a random one of its shape."""
    trained, random = demo_model().parent / "draft", tmp_path_factory.mktemp("random")
    torch.manual_seed(0)
    tensors = {
        name: torch.randn_like(tensor) / tensor.shape[-1] ** 0.5
        for name, tensor in load_file(trained / "model.safetensors").items()
    }
    save_file(tensors, random / "model.safetensors")
    (random / "config.json").write_text((trained / "config.json").read_text())
    return {"trained": trained, "random": random}


@pytest.fixture(scope="module")
def questions() -> list[Request]:
    """Return prompts on which the trained draft is often right; every other one is sampled."""
    tokenizer = Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(item.prompt).ids) for item in speculation_prompts(5, seed=1)]
    return [
        replace(question, prompt_token_ids=prompt, max_tokens=9)
        for question, prompt in zip(make_questions(5), prompts, strict=True)
    ]


@pytest.fixture(scope="module")
def expected(questions: list[Request]) -> list[Shown]:
    return on_the_wire(Reference(demo_model()).answers(questions))


def test_the_cells_have_every_pair() -> None:
    values = (list(SHAPES), [1, 2], [1, 2, 3], ["trained", "random"])
    for first, second in combinations(range(4), 2):
        if (first, second) != (0, 2):
            found = {(cell[first], cell[second]) for cell in CELLS}
            assert found == set(product(values[first], values[second]))


@pytest.mark.parametrize(
    ("name", "prefill_pp", "decode_pp", "draft"), mostly_long(CELLS, kept=[CELLS[0], CELLS[-2]])
)
async def test_a_draft_changes_no_bit(
    questions: list[Request],
    expected: list[Shown],
    drafts: dict[str, Path],
    name: str,
    prefill_pp: int,
    decode_pp: int,
    draft: str,
) -> None:
    shape = SHAPES[name]
    drafting = {
        "draft": drafts[draft],
        "spec_topk": shape.width,
        "spec_steps": shape.depth,
        "spec_draft_tokens": shape.nodes,
        "spec_adaptive": False,
    }
    async with cluster_in_process(
        demo_model(), prefill_pp=prefill_pp, decode_pp=decode_pp, prefill=drafting, decode=drafting
    ) as client:
        together = await asyncio.gather(
            *(client.complete(as_query(question), timeout_s=60) for question in questions)
        )
        assert [shown(completion) for completion in together] == expected
        for question, alone in zip(questions[1:2], expected[1:2], strict=True):
            assert shown(await client.complete(as_query(question), timeout_s=60)) == alone
