"""Several NextN layers, one for each step: chains are the formulas', and the output is that of
plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.assembly.cpu import CpuBackends
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import NO_TREE, SpecInfo, TokenTree
from engine.core.numerics import Numerics
from engine.memory.layout import CacheKind
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.layerwise import LayerwiseDrafter
from models.drafts.loader import read_draft
from models.loader import read_model
from pool.stage.config import WorkerConfig
from pool.stage.plan import plan_stage
from runtime.errors import ConfigError
from tests.decode.test_nextn import WANTED
from tests.decode.test_speculation import assert_nothing_leaked, shown
from tests.support.drafts.nextn import NextNOracle
from tests.support.drafts.tree_oracle import Cached
from tests.support.models.checkpoints import add_nextn, make_checkpoint
from tests.support.pool.local_pool import Speculation, local_pool


def layerwise(folder: Path, num_pages: int, page_size: int = 16) -> LayerwiseDrafter:
    """Build a draft over its own caches, filled with NaN."""
    draft = read_draft(folder, read_model(folder))
    layers = draft.load_layers(numerics=Numerics.EXACT)
    pools: dict[CacheKind, dict[int, torch.Tensor]] = {kind: {} for kind in CacheKind}
    for spec in draft.cache_specs(page_size):
        pools[spec.kind][spec.layer_id] = torch.full((num_pages, *spec.record_shape), float("nan"))
    attention = CpuBackends(Numerics.EXACT).of_draft(layers[0].attention_geometry(page_size), pools)
    return LayerwiseDrafter(layers=layers, attention=attention)


@dataclass
class CheckedChains:
    """A drafter whose every chain is compared with one grown by the formulas, layer by layer and
    slot by slot. A slot is computed once, with the tokens known or proposed when its token was
    accepted."""

    drafter: LayerwiseDrafter
    oracles: list[NextNOracle]
    caches: dict[int, list[Cached]] = field(default_factory=dict)
    num_batches: int = 0
    num_chains: int = 0
    num_equal: int = 0

    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        trees = self.drafter.propose(batch, output, runs)
        info, by_row = (
            batch.spec_info,
            {run.row: (run, tree) for run, tree in zip(runs, trees, strict=True)},
        )
        assert isinstance(info, SpecInfo)
        tokens, first = info.token_ids.tolist(), 0
        self.num_batches += any(row.num_draft_tokens for row in info.rows)
        for row, (key, length, start) in enumerate(
            zip(batch.request_keys, batch.query_lens, batch.context_lens, strict=True)
        ):
            run, tree = by_row.get(row, (None, NO_TREE))
            nodes = (
                list(run.accepted)
                if run is not None and batch.mode is ForwardMode.VERIFY
                else list(range(length))
            )
            last = info.rows[row].next_token_id if run is None else run.tokens[-1].token_id
            assert last is not None
            features = [
                output.aux_hidden[self.oracles[0].layers[0]][first + node] for node in nodes
            ]
            chain = self._chain(
                key, features, [*(tokens[first + node] for node in nodes[1:]), last], start
            )
            if run is not None:
                self.num_chains += 1
                self.num_equal += tree == TokenTree(
                    tuple(chain), tuple(range(-1, len(chain) - 1))
                ).first(len(tree))
                assert tree or not info.rows[row].num_draft_tokens
            first += length
        return trees

    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        return self.drafter.begin(batch)

    def _chain(
        self, key: int, features: list[torch.Tensor], tokens: list[int], start: int
    ) -> list[int]:
        caches = self.caches.setdefault(key, [[] for _ in self.oracles])
        hiddens, chain = [self.oracles[0].first_hidden(feature) for feature in features], []
        for layer_id, oracle in enumerate(self.oracles):
            cached, made = caches[layer_id][:start], []
            for offset, (token, hidden) in enumerate(zip(tokens, hiddens, strict=True)):
                after, cached = oracle.step(token, hidden, start + offset, cached)
                made.append(after)
            caches[layer_id], hiddens = cached, made
            chain.append(int(oracle.log_p(made[-1]).argmax()))
            tokens = [*tokens[1:], chain[-1]]
        return chain


@pytest.mark.parametrize(
    ("family", "num_layers", "size", "shares"),
    [("deepseek_v32", 2, 2, False), ("glm_moe_dsa", 3, 3, False), ("glm_moe_dsa", 3, 1, True)],
)
def test_s1_chains_of_several_layers_are_the_formulas(
    tmp_path: Path, family: str, num_layers: int, size: int, *, shares: bool
) -> None:
    """Every layer chooses its own keys, also where a config says that steps of one layer share a
    choice."""
    torch.set_num_threads(1)
    folder = add_nextn(
        make_checkpoint(tmp_path, family),
        tmp_path / "model",
        num_nextn_predict_layers=num_layers,
        index_share_for_mtp_iteration=shares,
    )
    description, made = read_model(folder), list[CheckedChains]()

    def build(num_pages: int) -> CheckedChains:
        oracles = [NextNOracle.of(folder, layer_id) for layer_id in range(num_layers)]
        made.append(CheckedChains(layerwise(folder, num_pages), oracles))
        return made[-1]

    with local_pool(description) as pool:
        expected = shown(pool.generate(WANTED))
    speculation = Speculation(build, num_layers, frozenset({description.facts.num_layers - 1}))
    with local_pool(description, size, chunk_tokens=16, speculation=speculation) as pool:
        assert shown(pool.generate(WANTED)) == expected
        assert_nothing_leaked(pool)
    (checked,) = made
    assert checked.num_chains > 10
    assert checked.num_equal >= 0.9 * checked.num_chains, (
        "but for scores that are equal up to rounding"
    )
    assert checked.drafter.num_plans == {"draft_extend": checked.num_batches, "draft_round": 0}, (
        "one for all layers"
    )


def test_draft_layers_follow_the_targets_and_chains_are_as_long(tmp_path: Path) -> None:
    folder = add_nextn(
        make_checkpoint(tmp_path, "deepseek_v32"), tmp_path / "model", num_nextn_predict_layers=2
    )
    plan = plan_stage(WorkerConfig(model=folder, draft=folder, num_pages=8))
    assert plan.num_draft_tokens == 2
    handed = [
        (spec.layer_id, spec.kind, spec.record_shape)
        for spec in plan.geometry.specs
        if spec.of_draft
    ]
    assert handed == [
        (layer_id, kind, (64, width))
        for layer_id in (4, 5)
        for kind, width in ((CacheKind.LATENT, 32), (CacheKind.INDEX_KEY, 16))
    ] + [(4, CacheKind.TOPK_P, (2,)), (4, CacheKind.TOPK_INDEX, (2,))]
    with pytest.raises(
        ConfigError, match="2 layers, one for each step, which make chains: spec_topk must be 1"
    ):
        plan_stage(WorkerConfig(model=folder, draft=folder, num_pages=8, spec_topk=2))
