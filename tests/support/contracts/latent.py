"""Contract of every latent attention backend: the formulas of MLA and DSA, token by token in
fp64."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import pytest
import torch
from torch import Tensor

from engine.contracts.latent import LatentAttentionBackend, LatentGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import AcceptedNodes, SpecInfo, SpecRow
from engine.pipeline.stage_executor import Commits
from runtime.errors import InternalError, StalePlanError

LAYER = 3
GEOMETRY = LatentGeometry(
    num_heads=4, latent_dim=24, rope_dim=8, page_size=16, scale=0.2, max_selected=8
)
INDEX_HEADS, INDEX_DIM = 3, 16
LONG = 150


class Committing(LatentAttentionBackend, Commits, Protocol):
    @property
    def num_plans(self) -> int: ...


Make = Callable[[Mapping[int, Tensor], Mapping[int, Tensor], LatentGeometry], Committing]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def over_poison(make: Make, *, is_sparse: bool = False) -> Committing:
    """Build pools full of NaN, so that a read of anything unwritten shows."""
    geometry = GEOMETRY if is_sparse else replace(GEOMETRY, max_selected=0)

    def pool(dim: int) -> Tensor:
        return torch.full((100, geometry.page_size, dim), float("nan"))

    return make({LAYER: pool(geometry.entry_dim)}, {LAYER: pool(INDEX_DIM)}, geometry)


def batch_of(
    rows: dict[int, tuple[int, int]],
    *,
    mode: ForwardMode = ForwardMode.PREFILL,
    spec_info: SpecInfo | None = None,
) -> ForwardBatch:
    """Build a batch of rows by sequence: (tokens in the cache, new tokens). A sequence owns ten
    pages, in a shuffled order."""
    tables = torch.stack([(torch.arange(10) * 7) % 10 + 10 * row + 1 for row in rows]).int()
    positions = [p for context, count in rows.values() for p in range(context, context + count)]
    return ForwardBatch(
        mode=mode,
        request_keys=tuple(rows),
        query_lens=tuple(count for _, count in rows.values()),
        context_lens=tuple(context for context, _ in rows.values()),
        token_ids=torch.zeros(len(positions)).long(),
        positions=torch.tensor(positions),
        page_tables=tables,
        slot_ids=torch.zeros(len(rows)).int(),
        sampling=(None,) * len(rows),
        spec_info=spec_info,
    )


def sequence(seed: int, length: int = LONG) -> dict[str, Tensor]:
    return {
        "q": draw(length, 4, 32, seed=seed),
        "entries": draw(length, 32, seed=seed + 1),
        "iq": draw(length, INDEX_HEADS, INDEX_DIM, seed=seed + 2),
        "ik": draw(length, INDEX_DIM, seed=seed + 3),
        "weights": draw(length, INDEX_HEADS, seed=seed + 4),
    }


def step(
    attention: LatentAttentionBackend,
    batch: ForwardBatch,
    inputs: list[dict[str, Tensor]],
    *,
    is_sparse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return output and choice for the batch's tokens, taken from each row's sequence at its
    positions."""
    attention.plan(batch)
    parts = [
        {name: tensor[context : context + count] for name, tensor in sequence.items()}
        for sequence, context, count in zip(
            inputs, batch.context_lens, batch.query_lens, strict=True
        )
    ]
    merged = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    selected = (
        attention.select(LAYER, merged["iq"], merged["ik"], merged["weights"], batch)
        if is_sparse
        else None
    )
    return attention.run(LAYER, merged["q"], merged["entries"], selected, batch), selected


def chosen_by_hand(inputs: dict[str, Tensor], position: int) -> list[int]:
    """Choose the best 8 by scores in fp64, of equal ones the earlier."""
    q, w = inputs["iq"][position].double(), inputs["weights"][position].double()
    scores = [
        float((w * torch.relu(q @ inputs["ik"][key].double() * INDEX_DIM**-0.5)).sum())
        for key in range(position + 1)
    ]
    return sorted(sorted(range(position + 1), key=lambda key: (-scores[key], key))[:8])


def attended_by_hand(inputs: dict[str, Tensor], position: int, keys: list[int]) -> Tensor:
    entries = inputs["entries"][keys].double()
    weights = (inputs["q"][position].double() @ entries.T * GEOMETRY.scale).softmax(-1)
    return (weights @ entries[:, :24]).float()


TREE = SpecInfo(torch.zeros(3).long(), (SpecRow(parents=(-1, 0, 0)),))


class LatentContract(ABC):
    """`exact`: the same bits in any company; else close to them. `length`: tokens of the sequences
    that are tried."""

    exact = True
    length = LONG

    @abstractmethod
    def make(
        self,
        latent_pools: Mapping[int, Tensor],
        index_pools: Mapping[int, Tensor],
        geometry: LatentGeometry,
    ) -> Committing: ...

    def backend(self, *, is_sparse: bool = False) -> Committing:
        return over_poison(self.make, is_sparse=is_sparse)

    def same(self, actual: Tensor, expected: Tensor) -> None:
        if self.exact:
            assert torch.equal(actual, expected)
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize("is_sparse", [True, False])
    def test_output_and_choice_match_the_formulas(self, *, is_sparse: bool) -> None:
        inputs = sequence(1, self.length)
        out, selected = step(
            self.backend(is_sparse=is_sparse),
            batch_of({0: (0, self.length)}),
            [inputs],
            is_sparse=is_sparse,
        )
        for position in (0, 1, 7, 8, 63, 64, 65, self.length - 1):
            keys = chosen_by_hand(inputs, position) if is_sparse else list(range(position + 1))
            if selected is not None:
                assert [key for key in selected[position].tolist() if key >= 0] == keys
            torch.testing.assert_close(
                out[position], attended_by_hand(inputs, position, keys), atol=1e-5, rtol=1e-5
            )

    @pytest.mark.parametrize("is_sparse", [True, False])
    def test_chunks_and_company_change_nothing(self, *, is_sparse: bool) -> None:
        inputs, other, last = sequence(1, self.length), sequence(50, self.length), self.length - 29
        whole, chosen = step(
            self.backend(is_sparse=is_sparse),
            batch_of({0: (0, self.length)}),
            [inputs],
            is_sparse=is_sparse,
        )
        attention, outs, choices = self.backend(is_sparse=is_sparse), [], []
        for start, count in ((0, 17), (17, 1), (18, last - 18), (last, 29)):
            batch = batch_of(
                {2: (start, count // 2), 0: (start, count)}
                if start == last
                else {0: (start, count)}
            )
            if start == last:
                step(attention, batch_of({2: (0, start)}), [other], is_sparse=is_sparse)
            out, selected = step(
                attention, batch, [other, inputs][-batch.num_rows :], is_sparse=is_sparse
            )
            outs.append(out[-count:])
            choices += (
                [] if selected is None else [row[row >= 0].tolist() for row in selected[-count:]]
            )
        self.same(torch.cat(outs), whole)
        if chosen is not None:
            assert choices == [row[row >= 0].tolist() for row in chosen]

    def test_equal_scores_go_to_the_earlier_key(self) -> None:
        inputs = sequence(1, length=20)
        inputs["weights"] = torch.zeros(20, INDEX_HEADS)
        _, selected = step(
            self.backend(is_sparse=True), batch_of({0: (0, 20)}), [inputs], is_sparse=True
        )
        assert selected is not None
        assert selected[19].tolist() == list(range(8))
        assert selected[2].tolist() == [0, 1, 2, -1, -1, -1, -1, -1]

    @pytest.mark.parametrize("is_sparse", [True, False])
    def test_a_token_of_a_tree_sees_the_committed_keys_and_its_ancestors_s2_6(
        self, *, is_sparse: bool
    ) -> None:
        """Node 2 is node 0's child, node 1 its brother: the path 0, 2 must equal the plain sequence
        of those tokens."""
        inputs = sequence(1, length=34)
        path = {name: torch.cat([tensor[:31], tensor[32:]]) for name, tensor in inputs.items()}
        plain, _ = step(
            self.backend(is_sparse=is_sparse), batch_of({0: (0, 33)}), [path], is_sparse=is_sparse
        )
        attention = self.backend(is_sparse=is_sparse)
        step(attention, batch_of({0: (0, 30)}), [inputs], is_sparse=is_sparse)
        batch = batch_of({0: (30, 3)}, mode=ForwardMode.VERIFY, spec_info=TREE)
        out, selected = step(attention, batch, [inputs], is_sparse=is_sparse)
        self.same(out[0], plain[30])
        self.same(out[2], plain[31])
        if selected is not None:
            assert 31 not in selected[2].tolist()
        # The next token, after nodes 0 and 2 were kept, finds their entries where plain decoding
        # stores them.
        kept = SpecRow(accepted=AcceptedNodes(context_len=30, nodes=(0, 2)))
        following = batch_of(
            {0: (32, 1)},
            mode=ForwardMode.DECODE,
            spec_info=SpecInfo(torch.zeros(1).long(), (kept,)),
        )
        attention.commit(following)
        out, _ = step(attention, following, [path], is_sparse=is_sparse)
        self.same(out[0], plain[32])

    def test_a_plan_of_another_batch_or_backend_is_refused(self) -> None:
        inputs, attention = sequence(1), self.backend()
        batch = batch_of({0: (0, 5)})
        with pytest.raises(StalePlanError):
            attention.run(LAYER, inputs["q"][:5], inputs["entries"][:5], None, batch)
        self.backend().plan(batch)
        with pytest.raises(StalePlanError):
            attention.run(LAYER, inputs["q"][:5], inputs["entries"][:5], None, batch)
        attention.plan(batch)
        with pytest.raises(StalePlanError, match="planned for 1 rows and 5 tokens"):
            attention.run(LAYER, inputs["q"][:6], inputs["entries"][:6], None, batch)
        assert attention.num_plans == 1

    def test_a_selecting_model_never_attends_without_a_selection(self) -> None:
        inputs, attention = sequence(1), self.backend(is_sparse=True)
        batch = batch_of({0: (0, 5)})
        attention.plan(batch)
        selected = torch.zeros(4, 8, dtype=torch.int32)
        for keys in (None, selected):
            with pytest.raises(InternalError, match="layer 3 needs the keys selected for 5 tokens"):
                attention.run(LAYER, inputs["q"][:5], inputs["entries"][:5], keys, batch)

    def test_a_layer_without_pages_is_named(self) -> None:
        inputs, attention = sequence(1), self.backend()
        batch = batch_of({0: (0, 5)})
        attention.plan(batch)
        with pytest.raises(InternalError, match="layer 4 has no latent pages"):
            attention.run(4, inputs["q"][:5], inputs["entries"][:5], None, batch)
        with pytest.raises(InternalError, match="layer 4 has no index keys"):
            attention.select(4, inputs["iq"][:5], inputs["ik"][:5], inputs["weights"][:5], batch)
        with pytest.raises(InternalError, match="latent pages are"):
            self.make({0: torch.zeros(4, 8, 32)}, {}, GEOMETRY)
