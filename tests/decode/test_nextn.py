"""NextN on a decode pool: its trees are those of the formulas, also where a choice of keys is
shared by the steps of a round, and the output is that of plain decoding."""

from pathlib import Path

import pytest
import torch

from engine.assembly.cpu import CpuBackends
from engine.core.numerics import Numerics, WeightFormat
from engine.core.request import Request
from engine.speculative.drafters.eagle import EagleDrafter
from models.drafts.loader import read_draft
from models.loader import read_model
from tests.decode.test_speculation import SAMPLING, assert_nothing_leaked, shown
from tests.support.drafts.drafters import CHAINS, TREES, Shape
from tests.support.drafts.nextn import NextNOracle, nan_pools
from tests.support.drafts.tree_oracle import CheckedDrafter
from tests.support.models.checkpoints import add_nextn, make_checkpoint
from tests.support.pool.local_pool import Answer, Speculation, local_pool

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
WANTED = [
    Request(
        f"r{i}",
        tuple(
            torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        ),
        8,
        SAMPLING[i],
        num_top_logprobs=2,
    )
    for i, length in enumerate((1, 12, 27))
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write checkpoints with a NextN layer; of GLM-5 also one whose draft's steps share a choice of
    keys."""
    folder = tmp_path_factory.mktemp("nextn")
    made = {
        family: add_nextn(make_checkpoint(folder, family), folder / family) for family in FAMILIES
    }
    made["sharing"] = add_nextn(
        make_checkpoint(folder, "glm_moe_dsa"),
        folder / "sharing",
        index_share_for_mtp_iteration=True,
    )
    return made


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, list[Answer]]:
    """Compute the output without speculation, which no field of the draft's config changes."""
    torch.set_num_threads(1)
    found = {}
    for family in FAMILIES:
        with local_pool(read_model(folders[family])) as pool:
            found[family] = pool.generate(WANTED)
    return {**found, "sharing": found["glm_moe_dsa"]}


def nextn(
    folder: Path, shape: Shape, num_pages: int, *, weight_format: WeightFormat = WeightFormat.MODEL
) -> EagleDrafter:
    model = read_draft(folder, read_model(folder, weight_format=weight_format)).load(
        numerics=Numerics.EXACT
    )
    attention = CpuBackends(Numerics.EXACT).of_draft(
        model.attention_geometry(16), nan_pools(model, 16, num_pages)
    )
    return EagleDrafter(model=model, attention=attention, topk=shape.width, steps=shape.depth)


@pytest.mark.parametrize(
    ("shape", "size"), [(CHAINS["chain 3"], 3), (TREES["tree 4x4/15"], 2)], ids=["chain", "tree"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_are_the_formulas(
    folders: dict[str, Path],
    references: dict[str, list[Answer]],
    family: str,
    shape: Shape,
    size: int,
) -> None:
    made: list[CheckedDrafter] = []

    def build(num_pages: int) -> CheckedDrafter:
        made.append(
            CheckedDrafter(
                nextn(folders[family], shape, num_pages), NextNOracle.of(folders[family]), shape
            )
        )
        return made[-1]

    description = read_model(folders[family])
    speculation = Speculation(build, shape.nodes, frozenset({description.facts.num_layers - 1}))
    with local_pool(description, size, chunk_tokens=16, speculation=speculation) as pool:
        assert shown(pool.generate(WANTED)) == shown(references[family])
        assert_nothing_leaked(pool)
    assert made[0].num_trees > 3
    assert made[0].num_equal >= 0.9 * made[0].num_trees, (
        "but for scores that are equal up to rounding"
    )


@pytest.mark.parametrize(
    ("shape", "size"), [(CHAINS["chain 5"], 2), (TREES["tree 8x5/31"], 1)], ids=["chain", "tree"]
)
def test_steps_that_share_a_choice_of_keys_change_nothing_s2_7(
    folders: dict[str, Path], references: dict[str, list[Answer]], shape: Shape, size: int
) -> None:
    folder = folders["sharing"]
    description = read_model(folder)
    speculation = Speculation(
        lambda num_pages: nextn(folder, shape, num_pages),
        shape.nodes,
        frozenset({description.facts.num_layers - 1}),
    )
    with local_pool(description, size, speculation=speculation) as pool:
        assert shown(pool.generate(WANTED)) == shown(references["sharing"])
        assert_nothing_leaked(pool)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "size"), [(CHAINS["chain 3"], 2), (TREES["tree 4x4/15"], 1)], ids=["chain", "tree"]
)
def test_weights_in_eight_bits_give_the_same_with_a_draft_in_eight_bits(
    tmp_path: Path, shape: Shape, size: int
) -> None:
    folder = add_nextn(
        make_checkpoint(tmp_path, "glm_moe_dsa", dtype=torch.bfloat16), tmp_path / "drafting"
    )
    description = read_model(folder, weight_format=WeightFormat.INT8)
    with local_pool(description) as pool:
        expected = shown(pool.generate(WANTED))
    speculation = Speculation(
        lambda num_pages: nextn(folder, shape, num_pages, weight_format=WeightFormat.INT8),
        shape.nodes,
        frozenset({description.facts.num_layers - 1}),
    )
    with local_pool(description, size, speculation=speculation) as pool:
        assert shown(pool.generate(WANTED)) == expected
        assert_nothing_leaked(pool)
