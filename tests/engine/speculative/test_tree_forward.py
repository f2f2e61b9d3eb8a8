"""A target pass over trees has, at every node, the bits of decoding that node's path one token at a
time."""

import random

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.backends.cpu.recurrent import CpuRecurrent
from engine.backends.recurrent_tree import TreeRecurrent
from engine.core.batch import ForwardMode, SamplingRow
from engine.core.draft_trees import AcceptedNodes, SpecInfo, SpecRow, TokenTree, ancestors
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from engine.core.request import SamplingParams
from engine.core.rows import Row, build_batch
from engine.memory.layout import CacheKind, PoolGeometry
from engine.memory.pools import StagePools
from engine.pipeline.stage_executor import StageExecutor
from models.loader import ModelDescription
from tests.support.models.tiny_models import HYBRID, LLAMA, QWEN3, tiny

PAGE_SIZE, MAX_NODES = 16, 8
CHAIN = TokenTree((10, 11, 12, 13, 14), (-1, 0, 1, 2, 3))
BUSHY = TokenTree((20, 21, 22, 23, 24, 25, 26), (-1, -1, 0, 0, 1, 2, 5))
ROOT = TokenTree()


class Sequences:
    """A whole model in one stage; each sequence owns six shuffled pages and a slot."""

    def __init__(self, description: ModelDescription, *, page_size: int = PAGE_SIZE) -> None:
        torch.set_num_threads(1)
        layers = LayerRange(0, description.facts.num_layers)
        pools = StagePools(
            PoolGeometry(page_size, 40, 8, layers, description.cache_specs(page_size)), poison=True
        )
        geometry = description.attention_geometry(page_size)
        assert geometry is not None
        exact = Numerics.EXACT
        kv, conv, state = (
            pools.of_kind(kind) for kind in (CacheKind.KV, CacheKind.CONV, CacheKind.STATE)
        )
        self.attention = CpuAttention(kv_pools=kv, geometry=geometry)
        self.recurrent = TreeRecurrent(
            slots=CpuRecurrent(conv_pools=conv, state_pools=state, numerics=exact),
            conv_pools=conv,
            state_pools=state,
            max_nodes=MAX_NODES,
            num_scratch=8,
            backend_over=lambda convs, states: CpuRecurrent(
                conv_pools=convs, state_pools=states, numerics=exact
            ),
        )
        self.executor = StageExecutor(
            model=description.load_stage(layers, numerics=exact),
            attention=self.attention,
            recurrent=self.recurrent,
            caches=(self.attention, self.recurrent),
        )
        ids = list(range(1, 37))
        random.Random(1).shuffle(ids)
        self._pages = [ids[6 * row : 6 * row + 6] for row in range(6)]
        self.lengths = [0] * 6

    def prefill(self, row: int, tokens: list[int]) -> None:
        self._run(ForwardMode.PREFILL, [self._row(row, tokens)])
        self.lengths[row] += len(tokens)

    def decode(self, row: int, token: int) -> Tensor:
        logits = self._run(ForwardMode.DECODE, [self._row(row, [token])])
        self.lengths[row] += 1
        return logits[0]

    def verify(
        self,
        trees: dict[int, tuple[int, TokenTree]],
        accepted: dict[int, AcceptedNodes] | None = None,
    ) -> list[Tensor]:
        """Return logits [nodes, vocab] per row of (root token, tree), before anything is
        accepted."""
        rows = [self._row(row, [root, *tree.token_ids]) for row, (root, tree) in trees.items()]
        specs = tuple(
            SpecRow(
                parents=tree.rooted_parents, accepted=(accepted or {}).get(row), scratch=7 - row
            )
            for row, (_, tree) in trees.items()
        )
        logits = self._run(ForwardMode.VERIFY, rows, specs)
        return list(torch.split(logits, [len(row.token_ids) for row in rows]))

    def accept(self, row: int, nodes: tuple[int, ...]) -> AcceptedNodes:
        accepted = AcceptedNodes(self.lengths[row], nodes)
        self.lengths[row] += len(nodes)
        return accepted

    def _row(self, row: int, tokens: list[int]) -> Row:
        return Row(
            row,
            tokens,
            self.lengths[row],
            self._pages[row],
            row + 1,
            SamplingRow(SamplingParams(), 0),
        )

    def _run(self, mode: ForwardMode, rows: list[Row], specs: tuple[SpecRow, ...] = ()) -> Tensor:
        batch = build_batch(mode, rows)
        if specs:
            assert batch.token_ids is not None
            batch.spec_info = SpecInfo(batch.token_ids, specs)
            batch.positions = torch.tensor(
                [
                    row.context_len + depth
                    for row, depths in zip(rows, batch.spec_info.depths, strict=True)
                    for depth in depths
                ]
            )
        logits = self.executor.run(batch).logits
        assert logits is not None
        return logits


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, 256) for _ in range(length)]


@pytest.fixture(
    scope="module", params=["hybrid-float32", "hybrid-bfloat16", "llama-float32", "qwen3-bfloat16"]
)
def description(request: pytest.FixtureRequest) -> ModelDescription:
    family, dtype = request.param.split("-")
    return tiny({"hybrid": HYBRID, "llama": LLAMA, "qwen3": QWEN3}[family], dtype)


def decoded(description: ModelDescription, length: int, tokens: list[int]) -> list[Tensor]:
    """Return logits after each of the tokens, decoded one by one after a prompt of this length."""
    plain = Sequences(description)
    plain.prefill(0, prompt(length))
    return [plain.decode(0, token) for token in tokens]


@pytest.mark.parametrize("tree", [ROOT, CHAIN, BUSHY], ids=["root", "chain", "tree"])
@pytest.mark.parametrize("length", [1, 15, 16, 63])
def test_every_node_equals_its_path_decoded(
    description: ModelDescription, length: int, tree: TokenTree
) -> None:
    sequences = Sequences(description)
    sequences.prefill(0, prompt(length))
    (found,) = sequences.verify({0: (7, tree)})
    tokens = [7, *tree.token_ids]
    for node in range(len(tokens)):
        path = [tokens[i] for i in ancestors(tree.rooted_parents, node)]
        assert torch.equal(found[node], decoded(description, length, path)[-1])


@pytest.mark.parametrize(
    "others", [{1: (8, CHAIN)}, {1: (8, BUSHY), 2: (9, ROOT)}], ids=["chain", "tree and root"]
)
def test_a_row_verifies_the_same_in_any_company(
    description: ModelDescription, others: dict[int, tuple[int, TokenTree]]
) -> None:
    for tree in (CHAIN, BUSHY):
        alone, together = Sequences(description), Sequences(description)
        for sequences in (alone, together):
            for row, length in enumerate((30, 5, 63)):
                sequences.prefill(row, prompt(length))
        assert torch.equal(
            together.verify({**others, 0: (7, tree)})[-1], alone.verify({0: (7, tree)})[0]
        )


@pytest.mark.parametrize(
    ("tree", "accepted"),
    [
        (ROOT, (0,)),
        (CHAIN, (0, 1, 2)),
        (CHAIN, (0, 1, 2, 3, 4, 5)),
        (BUSHY, (0,)),
        (BUSHY, (0, 2, 5)),
        (BUSHY, (0, 1, 3, 6, 7)),
    ],
)
@pytest.mark.parametrize("length", [14, 63])
def test_accepted_tokens_continue_like_decoding(
    description: ModelDescription, length: int, tree: TokenTree, accepted: tuple[int, ...]
) -> None:
    sequences = Sequences(description)
    sequences.prefill(0, prompt(length))
    sequences.verify({0: (7, tree)})
    found = sequences.accept(0, accepted)
    (after,) = sequences.verify({0: (9, ROOT)}, {0: found})
    path = [[7, *tree.token_ids][node] for node in accepted]
    assert torch.equal(after[0], decoded(description, length, [*path, 9])[-1])


def test_a_tree_is_planned_once(description: ModelDescription) -> None:
    sequences = Sequences(description)
    sequences.prefill(0, prompt(20))
    before = sequences.attention.num_plans
    sequences.verify({0: (7, BUSHY)})
    assert sequences.attention.num_plans == before + 1
    sequences.verify({0: (7, CHAIN)})
    assert sequences.attention.num_plans == before + 2


def test_rejected_nodes_leave_nothing(description: ModelDescription) -> None:
    """The same root verified after trees of other tokens were rejected gives the same bits."""
    sequences = Sequences(description)
    sequences.prefill(0, prompt(20))
    (first,) = sequences.verify({0: (7, BUSHY)})
    sequences.verify({0: (99, CHAIN)})
    (again,) = sequences.verify({0: (7, BUSHY)})
    assert torch.equal(first, again)
