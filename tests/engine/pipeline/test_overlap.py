"""Halves of a batch that take turns on the ranks of a stage (case ids: S1-6, S2-8)."""

import random
import threading
from collections.abc import Sequence
from functools import partial
from typing import cast

import pytest
import torch

from engine.contracts.attention import AttentionBackend
from engine.contracts.model import ForwardContext, StageModel, StageOutput
from engine.contracts.recurrent import RecurrentBackend
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.layer_range import TensorRank
from engine.core.request import Request, SampledToken, SamplingParams
from engine.core.rows import Row, build_batch, sampling_row
from engine.pipeline.frame_parts import FrameParts
from engine.pipeline.overlap import Half, Overlap
from engine.pipeline.ranks import StageRanks
from engine.pipeline.stage_executor import StageExecutor
from engine.pipeline.tensor_channel import TensorChannel
from pool.stage.config import WorkerConfig
from pool.start import check_ranks
from runtime.errors import ConfigError
from testing.inprocess_channel import InProcessChannel
from tests.support.models.tiny_models import GLM_DSA, HYBRID_MOE, QWEN3, tiny
from tests.support.pool.local_pool import local_pool

MODELS = {
    "dense": (QWEN3, "bfloat16"),
    "hybrid": (HYBRID_MOE, "float32"),
    "shared selections": (GLM_DSA, "float32"),
    "wide selections": ({**GLM_DSA, "index_topk": 100}, "float32"),
}


class Counted(Overlap):
    """Notes how many batches it ran."""

    num_batches = 0

    def run(self, first: Half, second: Half) -> StageOutput:
        self.num_batches += 1
        return super().run(first, second)


def answers(model: str, num_stages: int, overlaps: Sequence[Overlap]) -> list[list[SampledToken]]:
    rng = random.Random(5)
    requests = [
        Request(
            f"r{length}",
            tuple(rng.randrange(3, 250) for _ in range(length)),
            6,
            SamplingParams(temperature=0.7 * (length % 2), seed=length),
            num_top_logprobs=2,
        )
        for length in (5, 70, 33, 64, 90)
    ]
    with local_pool(
        tiny(*MODELS[model]), num_stages, tp=2 if overlaps else 1, overlaps=overlaps
    ) as pool:
        return [answer.tokens for answer in pool.generate(requests)]


@pytest.mark.parametrize(
    ("model", "num_stages"),
    [("dense", 1), ("hybrid", 1), ("shared selections", 2), ("wide selections", 2)],
)
def test_s2_8_halves_give_the_bits_of_the_whole(model: str, num_stages: int) -> None:
    """Each carries the keys that its tokens have selected, also to the next stage: so nothing has
    to be refused. Of up to 100 keys a half of short rows selects 64, and one with a longer row
    more."""
    overlaps = [Counted(2) for _ in range(2 * num_stages)]
    assert answers(model, num_stages, overlaps) == answers(model, 1, [])
    assert all(overlap.num_batches > 5 for overlap in overlaps)


class NoPlans:
    """Marks batches as planned."""

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        batch.mark_forward_metadata_ready(self)


def batch(*lengths: int, mode: ForwardMode = ForwardMode.PREFILL) -> ForwardBatch:
    sampling = sampling_row(Request("r", (1, 2, 3), 5), ())
    return build_batch(
        mode,
        [Row(key, [7] * length, 0, [key + 1], 0, sampling) for key, length in enumerate(lengths)],
    )


@pytest.mark.parametrize(
    ("lengths", "middle"),
    [
        ((8, 8), 1),
        ((1, 1, 14), 2),
        ((12, 1, 1, 2), 1),
        ((5, 6, 5), 1),
        ((16,), None),
        ((7, 8), None),
    ],
)
def test_rows_are_divided_by_tokens_from_a_threshold_on(
    lengths: tuple[int, ...], middle: int | None
) -> None:
    assert Overlap(16).middle(batch(*lengths)) == middle


@pytest.mark.parametrize("ranks", [{}, {"world_size": 4, "tp": 4, "dp_attention": 2}])
def test_stages_without_ranks_that_share_requests_are_refused(ranks: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match="--overlap-tokens 64 is for stages of several ranks"
    ) as refused:
        check_ranks(WorkerConfig.model_validate({"model": ".", "overlap_tokens": 64, **ranks}))
    assert refused.value.field == "overlap_tokens"


def test_trees_are_not_split() -> None:
    assert Overlap(2).middle(batch(3, 4, mode=ForwardMode.VERIFY)) is None


@pytest.mark.parametrize("slower", [0, 1])
def test_a_layer_is_done_when_both_halves_have_computed_it(slower: int) -> None:
    """One half needs more exchanges in each layer, so that the other half is always ahead of it."""
    overlap, computed, done = Overlap(2), list[tuple[int, int]](), list[int]()

    class Uneven:
        def forward(
            self, batch: ForwardBatch, hidden: object, context: ForwardContext, *rest: object
        ) -> StageOutput:
            half = 0 if batch.request_keys == (0,) else 1
            for layer in range(3):
                for _ in range(3 if half == slower else 1):
                    overlap.pass_turn()
                computed.append((half, layer))
                assert context.on_layer_done is not None
                context.on_layer_done(layer)
            return StageOutput(hidden=torch.zeros(batch.num_tokens, 1))

    def note(whole: ForwardBatch, layer: int) -> None:
        assert whole.num_rows == 2
        assert {(0, layer), (1, layer)} <= set(computed)
        done.append(layer)

    executor = StageExecutor(
        model=cast(StageModel, Uneven()),
        attention=cast(AttentionBackend, NoPlans()),
        recurrent=cast(RecurrentBackend, None),
        on_layer_done=note,
        overlap=overlap,
    )
    executor.run(batch(8, 8))
    assert done == [0, 1, 2]
    assert computed.index((1 - slower, 1)) < computed.index((slower, 0))


def test_s1_6_halves_are_planned_by_themselves() -> None:
    whole = batch(3, 4)
    whole.mark_forward_metadata_ready(object(), plan=object())
    assert [half.needs_forward_metadata_init() for half in whole.split(1)] == [True, True]


@pytest.mark.parametrize("piece_bytes", [1 << 20, 8])
def test_an_exchange_may_begin_while_another_is_under_way(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """Parts of several pieces, too, of which those of both exchanges come mixed."""
    monkeypatch.setattr(FrameParts, "max_bytes", piece_bytes)
    order: list[tuple[int, str, int]] = []
    channels = [TensorChannel(frames, max_bytes=1 << 20) for frames in InProcessChannel.pool(2)]
    overlaps, results = [Overlap(2), Overlap(2)], dict[int, StageOutput]()

    def half(ranks: StageRanks, name: str, num_rows: int) -> StageOutput:
        rows = torch.zeros(0, 2)
        for number in range(3):
            order.append((ranks.own.rank, name, number))
            rows = ranks.gather(torch.full((num_rows, 2), float(10 * number + ranks.own.rank)))
        return StageOutput(hidden=rows)

    def rank(place: int) -> None:
        ranks = StageRanks(TensorRank(place, 2), while_under_way=overlaps[place].pass_turn)
        ranks.use(channels[place])
        with ranks.step(1):
            results[place] = overlaps[place].run(
                partial(half, ranks, "first", 1), partial(half, ranks, "second", 4)
            )

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for place in range(2):
        hidden = results[place].hidden
        assert hidden is not None
        assert hidden[:, 0].tolist() == [20, 21] + [20] * 4 + [21] * 4
        assert [(name, number) for own, name, number in order if own == place] == [
            (name, number) for number in range(3) for name in ("first", "second")
        ]


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_of_one_half_ends_both(which: int) -> None:
    overlap, went_on = Overlap(2), []

    def half(place: int) -> StageOutput:
        overlap.pass_turn()
        if place == which:
            raise ValueError(f"half {place}")
        overlap.pass_turn()
        went_on.append(place)
        return StageOutput()

    with pytest.raises(ValueError, match=f"half {which}"):
        overlap.run(partial(half, 0), partial(half, 1))
    assert went_on == []
    assert (
        overlap.run(
            lambda: StageOutput(hidden=torch.zeros(1, 1)),
            lambda: StageOutput(hidden=torch.ones(1, 1)),
        ).hidden
        is not None
    ), "the next batch runs"
