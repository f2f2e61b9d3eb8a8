"""Contract of every attention backend. A test class per backend inherits this and builds the
backend."""

from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor

from engine.contracts.attention import AttentionBackend, AttentionGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from runtime.errors import InternalError, StalePlanError
from testing.batches import unmarked
from tests.support.kernels.attention import LAYER, Prompt, dense, feed, make_prompt, poisoned_pool
from tests.support.kernels.batches import Row, make_batch

GEOMETRY = AttentionGeometry(num_heads=6, num_kv_heads=2, head_dim=16, page_size=16, scale=0.2)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


class AttentionContract(ABC):
    """Contract over pools that start as NaN, so any read of an unwritten place shows in the
    result."""

    @abstractmethod
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> AttentionBackend: ...

    def build(
        self, geometry: AttentionGeometry = GEOMETRY, num_pages: int = 64
    ) -> AttentionBackend:
        return self.make(geometry, poisoned_pool(num_pages, geometry))

    @pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 63, 64, 65, 130, 300])
    def test_whole_prompt(self, num_tokens: int) -> None:
        prompt = make_prompt(num_tokens, GEOMETRY, pages=range(7, 7 + 19), seed=num_tokens)
        close(
            feed(self.build(), ForwardMode.PREFILL, (prompt, num_tokens)), dense(prompt, GEOMETRY)
        )

    @pytest.mark.parametrize("page_size", [4, 16, 64, 128])
    @pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
    def test_page_sizes_and_head_groups(self, page_size: int, heads: tuple[int, int]) -> None:
        geometry = AttentionGeometry(*heads, head_dim=8, page_size=page_size, scale=0.35)
        prompt = make_prompt(
            150, geometry, pages=range(1, 1 + -(-150 // page_size)), seed=page_size
        )
        backend = self.build(geometry)
        feed(backend, ForwardMode.PREFILL, (prompt, 133))
        for _ in range(17):
            feed(backend, ForwardMode.DECODE, (prompt, 1))
        close(prompt.output(), dense(prompt, geometry))

    def test_scattered_pages_in_any_order(self) -> None:
        prompt = make_prompt(70, GEOMETRY, pages=(9, 2, 40, 1, 30), seed=1)
        close(feed(self.build(), ForwardMode.PREFILL, (prompt, 70)), dense(prompt, GEOMETRY))

    def test_prompts_of_any_length_share_a_batch(self) -> None:
        lengths = (1, 40, 7, 129, 40, 16)
        prompts = [
            make_prompt(n, GEOMETRY, pages=range(1 + 9 * i, 10 + 9 * i), seed=i)
            for i, n in enumerate(lengths)
        ]
        feed(self.build(), ForwardMode.PREFILL, *zip(prompts, lengths, strict=True))
        for prompt in prompts:
            close(prompt.output(), dense(prompt, GEOMETRY))

    def test_chunks_continue_cached_keys(self) -> None:
        first = make_prompt(90, GEOMETRY, pages=range(1, 7), seed=1)
        second = make_prompt(60, GEOMETRY, pages=range(7, 11), seed=2)
        backend = self.build()
        feed(backend, ForwardMode.PREFILL, (first, 33))
        feed(backend, ForwardMode.PREFILL, (first, 50), (second, 21))
        feed(backend, ForwardMode.PREFILL, (second, 39), (first, 7))
        close(first.output(), dense(first, GEOMETRY))
        close(second.output(), dense(second, GEOMETRY))

    @pytest.mark.parametrize("lengths", [(5, 64, 100, 1, 63), (3, 40), (90, 70, 80)])
    def test_decode_of_rows_of_different_length(self, lengths: tuple[int, ...]) -> None:
        prompts = [
            make_prompt(n + 4, GEOMETRY, pages=range(1 + 7 * i, 8 + 7 * i), seed=i)
            for i, n in enumerate(lengths)
        ]
        backend = self.build()
        feed(backend, ForwardMode.PREFILL, *zip(prompts, lengths, strict=True))
        for _ in range(4):
            feed(backend, ForwardMode.DECODE, *((prompt, 1) for prompt in prompts))
        for prompt in prompts:
            close(prompt.output(), dense(prompt, GEOMETRY))

    def test_a_forward_writes_its_own_tokens_only(self) -> None:
        pool = torch.full((8, 2, 2, 16, 16), 7.0)
        prompt = make_prompt(20, GEOMETRY, pages=(5, 2), seed=1)
        feed(self.make(GEOMETRY, pool), ForwardMode.PREFILL, (prompt, 20))
        for part, x in enumerate((prompt.k, prompt.v)):
            assert torch.equal(pool[5, part], x[:16].transpose(0, 1))
            assert torch.equal(pool[2, part, :, :4], x[16:].transpose(0, 1))
        assert (pool[2, :, :, 4:] == 7.0).all()
        assert (pool[[0, 1, 3, 4, 6, 7]] == 7.0).all()

    def test_nothing_to_do(self) -> None:
        backend = self.build()
        for mode, rows in ((ForwardMode.IDLE, []), (ForwardMode.PREBUILT, [Row(0, 12, (1,))])):
            batch = make_batch(mode, rows)
            backend.plan(batch)
            empty = torch.empty(0, 2, 16)
            assert backend.run(LAYER, torch.empty(0, 6, 16), empty, empty, batch).shape == (
                0,
                6,
                16,
            )

    def test_planning_marks_the_batch(self) -> None:
        batch = make_batch(ForwardMode.DECODE, [Row(1, 3, (1,)), Row(1, 5, (2,))])
        backend = self.build()
        assert batch.needs_forward_metadata_init()
        backend.plan(batch)
        assert not batch.needs_forward_metadata_init()
        assert batch.forward_metadata_planner is backend
        assert (batch.forward_metadata_planned_bs, batch.forward_metadata_planned_num_tokens) == (
            2,
            2,
        )
        assert not batch.forward_metadata_replan_equivalent
        backend.plan(batch, replan_equivalent=True)
        assert batch.forward_metadata_replan_equivalent

    def test_an_unplanned_batch_is_refused(self) -> None:
        batch = make_batch(ForwardMode.DECODE, [Row(1, 3, (1,))])
        with pytest.raises(StalePlanError):
            self._run(self.build(), batch.num_tokens, batch)

    def test_another_backends_plan_is_refused(self) -> None:
        batch = make_batch(ForwardMode.DECODE, [Row(1, 3, (1,))])
        self.build().plan(batch)
        with pytest.raises(StalePlanError):
            self._run(self.build(), batch.num_tokens, batch)

    def test_a_mark_is_not_a_plan(self) -> None:
        batch = make_batch(ForwardMode.DECODE, [Row(1, 3, (1,))])
        backend = self.build()
        batch.mark_forward_metadata_ready(backend)
        with pytest.raises(StalePlanError):
            self._run(backend, batch.num_tokens, batch)

    def test_rows_of_a_derived_batch_are_not_covered(self) -> None:
        batch = make_batch(ForwardMode.DECODE, [Row(1, 3, (1,)), Row(1, 5, (2,))])
        backend = self.build()
        backend.plan(batch)
        for derived in (unmarked(batch), batch.filter([0]), *batch.split(1)):
            with pytest.raises(StalePlanError):
                self._run(backend, derived.num_tokens, derived)

    @pytest.mark.parametrize("num_tokens", [1, 3])
    def test_rows_the_plan_does_not_cover_are_refused(self, num_tokens: int) -> None:
        rows = [Row(1, 3, (1,)), Row(1, 5, (2,))]
        batch = make_batch(ForwardMode.DECODE, rows)
        backend = self.build()
        backend.plan(batch)
        other = make_batch(ForwardMode.DECODE, [*rows, Row(1)][:num_tokens])
        for name in (
            "request_keys",
            "query_lens",
            "context_lens",
            "token_ids",
            "positions",
            "page_tables",
            "slot_ids",
            "sampling",
        ):
            setattr(batch, name, getattr(other, name))
        assert not batch.needs_forward_metadata_init()
        with pytest.raises(StalePlanError):
            self._run(backend, num_tokens, batch)

    def test_a_row_without_tokens_is_not_covered_either(self) -> None:
        batch = make_batch(ForwardMode.PREFILL, [Row(1, 3, (1,))])
        backend = self.build()
        backend.plan(batch)
        batch.request_keys, batch.query_lens, batch.context_lens = (0, 1), (1, 0), (3, 0)
        with pytest.raises(StalePlanError):
            self._run(backend, 1, batch)

    def test_another_geometry_is_refused(self) -> None:
        batch = make_batch(ForwardMode.DECODE, [Row(1, 3, (1,))])
        backend = self.build()
        backend.plan(batch)
        with pytest.raises(StalePlanError):
            backend.run(
                LAYER, torch.zeros(1, 3, 16), torch.zeros(1, 2, 16), torch.zeros(1, 2, 16), batch
            )
        with pytest.raises(StalePlanError):
            backend.run(
                LAYER, torch.zeros(1, 6, 16), torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), batch
            )

    def test_a_layer_of_another_stage_is_refused(self) -> None:
        batch = make_batch(ForwardMode.DECODE, [Row(1, 0, (1,))])
        backend = self.build()
        backend.plan(batch)
        kv = torch.zeros(1, 2, 16)
        with pytest.raises(InternalError, match="layer 9"):
            backend.run(9, torch.zeros(1, 6, 16), kv, kv, batch)

    @staticmethod
    def _run(backend: AttentionBackend, num_tokens: int, batch: ForwardBatch) -> Tensor:
        kv = torch.zeros(num_tokens, 2, 16)
        return backend.run(LAYER, torch.zeros(num_tokens, 6, 16), kv, kv, batch)


class SinkContract(ABC):
    """Contract of a backend that supports sinks."""

    @abstractmethod
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> AttentionBackend: ...

    def test_a_sink_takes_part_in_the_softmax_and_has_no_value(self) -> None:
        sinks = torch.tensor([0.0, 5.0, -200.0, 40.0, 1.5, -3.0])  # times 0.2
        prompt = make_prompt(150, GEOMETRY, pages=range(1, 11), seed=1)
        backend = self.make(GEOMETRY, poisoned_pool(64, GEOMETRY))
        feed(backend, ForwardMode.PREFILL, (prompt, 133), sinks=sinks)
        for _ in range(17):
            feed(backend, ForwardMode.DECODE, (prompt, 1), sinks=sinks)
        close(prompt.output(), dense(prompt, GEOMETRY, sinks=sinks))


class TreeContract(ABC):
    """Contract of a backend that verifies trees."""

    @abstractmethod
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> AttentionBackend: ...

    def test_tokens_of_a_tree_see_the_prefix_and_their_ancestors(self) -> None:
        #      0            and, for the second prompt,  0 -> 1 -> 2
        #    1   2
        #   3   4
        trees = [(-1, 0, 0, 1, 2), (-1, 0, 1)]
        seen = [
            torch.tensor(
                [
                    [1, 0, 0, 0, 0],
                    [1, 1, 0, 0, 0],
                    [1, 0, 1, 0, 0],
                    [1, 1, 0, 1, 0],
                    [1, 0, 1, 0, 1],
                ]
            ),
            torch.ones(3, 3).tril(),
        ]
        prompts = [
            make_prompt(66, GEOMETRY, pages=range(1, 6), seed=1),
            make_prompt(20, GEOMETRY, pages=(7, 8), seed=2),
        ]
        backend = self.make(GEOMETRY, poisoned_pool(80, GEOMETRY))
        feed(backend, ForwardMode.PREFILL, (prompts[0], 61), (prompts[1], 17))
        feed(backend, ForwardMode.VERIFY, (prompts[0], 5), (prompts[1], 3), trees=trees)
        for prompt, own in zip(prompts, seen, strict=True):
            self._check(prompt, own.bool())

    def test_trees_of_one_size_after_prefixes_of_different_length(self) -> None:
        tree = (-1,) * 4  # no node's ancestors: four guesses at the same token
        prompts = [
            make_prompt(n, GEOMETRY, pages=range(9 * n, 9 * n + 5), seed=n) for n in (5, 6, 7)
        ]
        backend = self.make(GEOMETRY, poisoned_pool(80, GEOMETRY))
        feed(backend, ForwardMode.PREFILL, *((prompt, len(prompt.q) - 4) for prompt in prompts))
        feed(backend, ForwardMode.VERIFY, *((prompt, 4) for prompt in prompts), trees=[tree] * 3)
        for prompt in prompts:
            self._check(prompt, torch.eye(4).bool())

    @staticmethod
    def _check(prompt: Prompt, own: Tensor) -> None:
        """Check a forward; `own` [N, N]: which of the last N tokens each of them sees."""
        visible = torch.ones(len(prompt.q), len(prompt.q), dtype=torch.bool).tril()
        visible[-len(own) :, -len(own) :] = own
        close(prompt.output(), dense(prompt, GEOMETRY, visible=visible))
