"""Recorded steps against eager ones: the same bits, independent of the recording and earlier
steps."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.assembly.backend_set import StageCaches
from engine.assembly.cpu import CpuBackends
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, ScoringRow
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from engine.core.state_rows import StateRow, StateSnapshot
from engine.graphs import host_steps
from engine.graphs.host_steps import HostSteps
from engine.memory.layout import CacheKind
from engine.pipeline.stage_executor import LayerObserver, StageExecutor
from models.blocks import low_rank
from models.loader import ModelDescription
from runtime.errors import InternalError, StalePlanError
from testing.batches import unmarked
from tests.support.device.captured_stage import (
    MAX_ROWS,
    NUM_SEQUENCES,
    PAGE_SIZE,
    PAGES_EACH,
    Sequences,
)
from tests.support.models.adapters import with_adapters, write_adapter
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.tiny_models import HYBRID, LLAMA, QWEN3, tiny

MAX_NODES, CHUNK_TOKENS = 10, 9
CHAIN, FORK, BUSH = (-1, 0, 1, 2), (-1, 0, 0, 1), (-1, 0, 0, 0)


@dataclass
class HostStage:
    """One stage with its own pools, all NaN at first; its steps are recorded, or all eager."""

    description: ModelDescription
    layers: LayerRange
    capture_layers: frozenset[int] = frozenset()
    is_recorded: bool = True
    num_eager: int = 0
    observer: LayerObserver | None = None
    pools: dict[CacheKind, dict[int, Tensor]] = field(
        default_factory=lambda: {kind: {} for kind in CacheKind}
    )

    def __post_init__(self) -> None:
        for spec in self.description.cache_specs(PAGE_SIZE):
            if spec.layer_id in self.layers:
                count = NUM_SEQUENCES * PAGES_EACH + 1 if spec.kind.is_paged else NUM_SEQUENCES + 1
                self.pools[spec.kind][spec.layer_id] = torch.full(
                    (count, *spec.record_shape), float("nan"), dtype=getattr(torch, spec.dtype)
                )
        caches = StageCaches(
            *(
                self.pools[kind]
                for kind in (
                    CacheKind.KV,
                    CacheKind.LATENT,
                    CacheKind.INDEX_KEY,
                    CacheKind.CONV,
                    CacheKind.STATE,
                    CacheKind.WINDOW,
                )
            )
        )
        backends = (
            CpuBackends(Numerics.EXACT)
            .of_stage(
                caches,
                self.description.attention_geometry(PAGE_SIZE),
                None,
                max_nodes=MAX_NODES,
                num_scratch=NUM_SEQUENCES + 1 if caches.conv else 0,
            )
            .with_snapshots(caches)
        )
        self.model = self.description.load_stage(
            self.layers, numerics=Numerics.EXACT, capture_layers=self.capture_layers
        )
        assert backends.attention is not None
        assert backends.states is not None
        self.attention = backends.attention
        self.steps = HostSteps(
            model=self.model,
            attention=backends.attention,
            recurrent=backends.recurrent,
            states=backends.states,
            max_rows=MAX_ROWS,
            chunk_tokens=CHUNK_TOKENS,
            observer=self.observer,
            num_eager=self.num_eager,
        )
        self.executor = StageExecutor(
            model=self.model,
            attention=backends.attention,
            recurrent=backends.recurrent,
            caches=backends.caches,
            on_layer_done=self.observer,
            graphs=self.steps if self.is_recorded else None,
        )


class Twins:
    """The same stages twice, recorded and eager, fed the same."""

    def __init__(
        self,
        config: dict[str, object] | ModelDescription,
        dtype: str = "float32",
        *,
        cuts: Sequence[int] = (),
        capture_layers: frozenset[int] = frozenset(),
        num_eager: int = 0,
    ) -> None:
        model = config if isinstance(config, ModelDescription) else tiny(config, dtype)
        ranges = [
            LayerRange(start, end) for start, end in pairwise([0, *cuts, model.facts.num_layers])
        ]
        self.sequences = Sequences()
        self.keys = {"": "", **{adapter.name: adapter.key for adapter in model.adapters}}
        self.num_steps = 0
        self.recorded, self.eager = (
            [HostStage(model, layers, capture_layers, is_recorded, num_eager) for layers in ranges]
            for is_recorded in (True, False)
        )

    def step(
        self,
        mode: ForwardMode,
        counts: dict[int, int],
        *,
        parents: dict[int, tuple[int, ...]] | None = None,
        silent: Sequence[int] = (),
    ) -> None:
        """Run one batch through both, every second one planned ahead; verified nodes are
        dropped."""
        batch = self.sequences.batch(mode, counts, parents=parents, silent=silent)
        outputs = []
        self.num_steps += 1
        for stages in (self.recorded, self.eager):
            output = StageOutput()
            for stage in stages:
                local = replace(
                    unmarked(batch),
                    spec_info=batch.spec_info,
                    token_ids=batch.token_ids if stage is stages[0] else None,
                )
                if self.num_steps % 2:
                    stage.executor.plan_ahead(local)
                output = stage.executor.run(local, output)
            outputs.append(output)
        for actual, expected in zip(*map(_tensors, outputs), strict=True):
            assert torch.equal(actual, expected)
        for recorded, eager in zip(self.recorded, self.eager, strict=True):
            for kind, pools in recorded.pools.items():
                for layer_id, pool in pools.items():
                    assert pool.nan_to_num(-7.0).equal(
                        eager.pools[kind][layer_id].nan_to_num(-7.0)
                    ), (kind, layer_id)
        if mode is not ForwardMode.VERIFY:
            self.sequences.advance(counts)

    def have(self, adapters: dict[int, str]) -> None:
        """Give sequences these adapters, by their names."""
        self.sequences.adapters = {row: self.keys[name] for row, name in adapters.items()}

    def decode(self, *rows: int) -> None:
        self.step(ForwardMode.DECODE, dict.fromkeys(rows, 1))

    def counts(self) -> tuple[int, int]:
        """Return the number of recordings and replays."""
        steps = [stage.steps for stage in self.recorded]
        return sum(each.num_recorded for each in steps), sum(each.num_replays for each in steps)


def _tensors(output: StageOutput) -> list[Tensor]:
    assert output.logits is not None
    return [output.logits, *output.aux_hidden.values()]


def prefilled(twins: Twins, *lengths: int) -> Twins:
    for row, length in enumerate(lengths):
        twins.step(ForwardMode.PREFILL, {row: length})
    return twins


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [LLAMA, QWEN3, HYBRID], ids=["llama", "qwen3", "hybrid"])
def test_replays_have_the_bits_of_eager_steps(config: dict[str, object], dtype: str) -> None:
    twins = prefilled(
        Twins(config, dtype, cuts=(2,), capture_layers=frozenset({1, 3})), 5, 30, 1, 17
    )
    for turn in range(40):
        chosen = random.sample(range(4), random.randint(1, MAX_ROWS))
        if turn % 3:
            twins.decode(*chosen)
        else:
            shape = random.choice([CHAIN, CHAIN[:2]])
            twins.step(
                ForwardMode.VERIFY,
                dict.fromkeys(chosen, len(shape)),
                parents=dict.fromkeys(chosen, shape),
            )
    recorded, replayed = twins.counts()
    assert recorded + replayed == 80
    assert replayed > recorded


@pytest.fixture
def adapted(tmp_path: Path) -> ModelDescription:
    """Return a tiny Llama with adapters of two ranks, one of them of attention alone."""
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    write_adapter(tmp_path / "adapters" / "a", model, seed=1)
    write_adapter(tmp_path / "adapters" / "b", model, seed=2)
    write_adapter(tmp_path / "adapters" / "c", model, seed=3, rank=3, targets=["q_proj", "o_proj"])
    return with_adapters(model, tmp_path / "adapters")


def test_rows_with_adapters_are_replayed_by_their_mix(
    adapted: ModelDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the tables and indices of a recorded step have been dropped elsewhere."""
    monkeypatch.setattr(low_rank, "_MAX_TABLES", 1)
    twins = Twins(adapted, cuts=(2,))
    mixes = [("a", "", "c"), ("b", "b", "a"), ("", "c", "c"), ("", "", "")]
    prefilled(twins, 5, 30, 1)
    for turn in range(4):
        for mix in mixes:
            twins.have(dict(enumerate(mix)))
            twins.decode(0, 1, 2)
            if turn % 2:
                twins.step(
                    ForwardMode.VERIFY, dict.fromkeys((0, 1), 4), parents={0: CHAIN, 1: CHAIN}
                )
            torch.full((1 << 16,), -1)  # where freed memory may have been
    assert twins.counts() == (2 * 8, 2 * (12 + 4))


def test_chunks_with_an_adapter_are_replayed(adapted: ModelDescription) -> None:
    twins = Twins(adapted)
    for row, adapter in enumerate(("a", "", "a", "c")):
        twins.have({row: adapter})
        for silent in ((row,), (row,), ()):
            twins.step(ForwardMode.PREFILL, {row: CHUNK_TOKENS}, silent=silent)
    recorded, replayed = twins.counts()
    assert (recorded, replayed) == (6, 6)


def test_recordings_with_adapters_are_bounded(
    adapted: ModelDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_steps, "MAX_WITH_ADAPTERS", 2)
    twins = prefilled(Twins(adapted), 5)
    twins.decode(0)
    for adapters, replays in (("abc", 0), ("cb", 2), ("a", 2), ("ca", 4), ("b", 4)):
        for adapter in adapters:
            twins.have({0: adapter})
            twins.decode(0)
        assert twins.counts()[1] == replays
    twins.have({})
    twins.decode(0)
    assert twins.counts()[1] == 5, "those without adapters are kept"


def test_a_dropped_adapter_leaves_no_recording(adapted: ModelDescription) -> None:
    """And one that comes again is recorded again, beside those that stayed."""
    twins = prefilled(Twins(adapted), 5, 6)
    mixes: list[dict[int, str]] = [{0: "a", 1: "b"}, {0: "b"}, {}]
    by_name = {adapter.name: adapter for adapter in adapted.adapters}
    for mix, counts in zip(
        mixes * 3, [(1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (4, 2)], strict=False
    ):
        twins.have(mix)
        twins.decode(0, 1)
        assert twins.counts() == counts
        if counts == (3, 0):
            for stage in (*twins.recorded, *twins.eager):
                stage.executor.forget_adapter(twins.keys["a"])
                stage.model.adapters.drop(twins.keys["a"])
                adapted.load_adapter(stage.model, by_name["a"])


def test_a_shape_is_recorded_when_it_has_come_before() -> None:
    twins = prefilled(Twins(LLAMA, num_eager=2), 5, 30)
    for replays in (0, 0, 0, 1, 2):
        twins.decode(0)
        assert twins.counts()[1] == replays
    twins.decode(0, 1)
    assert twins.counts() == (1, 2)


@pytest.mark.usefixtures("_two_threads")
def test_they_do_so_on_several_threads() -> None:
    twins = prefilled(Twins(HYBRID, "bfloat16"), 5, 30)
    for _ in range(3):
        twins.decode(0, 1)
    assert twins.counts() == (1, 2)


@pytest.mark.parametrize("config", [LLAMA, HYBRID], ids=["attention", "hybrid"])
def test_trees_of_one_size_are_replayed_with_any_branches(config: dict[str, object]) -> None:
    twins = prefilled(Twins(config, cuts=(1,)), 3, 20, 16)
    steps: list[dict[int, tuple[int, ...]]] = [
        {0: FORK, 1: BUSH},
        {2: BUSH, 1: FORK},
        {0: CHAIN, 2: CHAIN},
        {1: FORK, 2: CHAIN},
    ]
    for shapes in steps:
        twins.step(ForwardMode.VERIFY, dict.fromkeys(shapes, 4), parents=shapes)
    assert twins.counts() == (4, 4)  # trees, of which chains may be some; chains alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_whole_chunks_of_prompts_are_replayed(config: dict[str, object], dtype: str) -> None:
    """From any position, with others in between; after some a token is sampled."""
    twins = Twins(config, dtype, cuts=(2,), capture_layers=frozenset({1, 3}))
    for row, lengths in enumerate([(9, 9, 9, 9), (5, 9, 9), (9, 16, 9), (9, 9, 3, 9)]):
        for place, count in enumerate(lengths):
            twins.step(
                ForwardMode.PREFILL, {row: count}, silent=(row,) if place + 1 < len(lengths) else ()
            )
        twins.decode(row)
    recorded, replayed = twins.counts()
    assert recorded == 2 * 3, (
        "on two stages: chunks behind which tokens are drawn, others, and drawn tokens"
    )
    assert recorded + replayed == 2 * (11 + 4)


def test_whole_chunks_of_hybrid_models_are_replayed_too() -> None:
    """They begin on a grid of 64 tokens, which is all that these sequences have room for."""
    twins = Twins(HYBRID, cuts=(2,))
    for row in range(6):
        twins.step(ForwardMode.PREFILL, {row: CHUNK_TOKENS}, silent=(row,) if row % 2 else ())
        twins.decode(row)
    assert twins.counts() == (2 * 3, 2 * (4 + 5))


def test_layers_of_replays_are_reported_as_they_complete() -> None:
    seen: list[tuple[ForwardBatch, int]] = []
    stage = HostStage(
        tiny(LLAMA),
        LayerRange(0, 2),
        observer=lambda batch, layer_id: seen.append((batch, layer_id)),
    )
    sequences = Sequences()
    for _ in range(3):
        batch = sequences.batch(ForwardMode.PREFILL, {0: CHUNK_TOKENS})
        pools = [pool[batch.page_tables[0].long()] for pool in stage.pools[CacheKind.KV].values()]
        stage.executor.run(batch)
        assert [(id(of), layer_id) for of, layer_id in seen] == [(id(batch), 0), (id(batch), 1)]
        assert not any(
            torch.equal(before, pool[batch.page_tables[0].long()])
            for before, pool in zip(pools, stage.pools[CacheKind.KV].values(), strict=True)
        )
        seen.clear()
    assert stage.steps.num_replays == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda _, output: output.logits.max().item(),
        lambda batch, _: sum(batch.context_lens),
        lambda batch, _: batch.context_lens[0],
        lambda batch, _: torch.tensor(batch.context_lens),
        lambda batch, _: np.array(batch.context_lens, np.int32),
    ],
    ids=["a value", "lengths", "a length", "by torch", "by numpy"],
)
def test_a_forward_that_cannot_be_recorded_runs_once(
    read: Callable[[ForwardBatch, StageOutput], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, and recurrent states would have gone through its tokens twice."""
    twins = prefilled(Twins(HYBRID), 9, 9)
    (stage,) = twins.recorded
    forward = stage.model.forward

    def reading(batch: ForwardBatch, *arguments: Any) -> StageOutput:  # noqa: ANN401
        output = forward(batch, *arguments)
        read(batch, output)
        return output

    monkeypatch.setattr(stage.model, "forward", reading)
    for _ in range(3):
        twins.decode(0, 1)
    assert twins.counts() == (1, 1), "of the prompts"
    assert stage.steps.bucket_for(twins.sequences.batch(ForwardMode.DECODE, {0: 1})) is None
    assert stage.steps.bucket_for(twins.sequences.batch(ForwardMode.PREFILL, {0: 9})) is not None


def test_batches_that_fit_no_graph_run_eagerly_between_replays() -> None:
    twins = prefilled(Twins(HYBRID), 3, 4, 5, 6)
    twins.decode(0, 1)
    for _ in range(2):
        twins.decode(0, 1, 2, 3)
        twins.step(ForwardMode.PREFILL, {4: 7})
        twins.sequences.lengths[4] = 0
        twins.step(ForwardMode.VERIFY, {0: 2, 1: 3}, parents={0: (-1, 0), 1: (-1, 0, 1)})
        twins.decode(1, 2)
    assert twins.counts() == (1, 2)


def test_a_step_is_recorded_again_when_rows_outgrow_its_tables() -> None:
    twins = prefilled(Twins(LLAMA), 14)
    while twins.sequences.lengths[0] < PAGE_SIZE * PAGES_EACH:
        twins.decode(0)
    recorded, replayed = twins.counts()
    assert (recorded, recorded + replayed) == (
        2,
        PAGE_SIZE * PAGES_EACH - 14,
    )  # for two pages of a row, and for four


def test_a_row_that_starts_in_a_used_slot_has_no_earlier_state() -> None:
    twins = prefilled(Twins(HYBRID), 8)
    for _ in range(3):
        twins.decode(0)
        twins.sequences.lengths[0] = 0
    assert twins.counts() == (1, 2)


@pytest.mark.parametrize(
    "change",
    ["scores", "is silent", "hands out a state", "is too large", "is a prompt", "is empty"],
)
def test_batches_that_do_more_than_draw_are_left_alone(change: str) -> None:
    twins = prefilled(Twins({**LLAMA, "num_hidden_layers": 1}), 3, 4)
    sequences, steps = twins.sequences, twins.recorded[0].steps
    batch = sequences.batch(ForwardMode.DECODE, {0: 1, 1: 1})
    assert steps.bucket_for(batch) is not None
    changed = {
        "scores": lambda: replace(batch, scoring=(ScoringRow((1,), 0), None)),
        "is silent": lambda: sequences.batch(ForwardMode.DECODE, {0: 1, 1: 1}, silent=(1,)),
        "hands out a state": lambda: replace(
            batch, states=(StateRow(snapshots=(StateSnapshot(4, 1),)), StateRow())
        ),
        "is too large": lambda: sequences.batch(
            ForwardMode.DECODE, dict.fromkeys(range(MAX_ROWS + 1), 1)
        ),
        "is a prompt": lambda: sequences.batch(ForwardMode.PREFILL, {0: 1}),
        "is empty": lambda: sequences.batch(ForwardMode.DECODE, {}),
    }[change]()
    assert steps.bucket_for(changed) is None


def test_a_plan_of_another_shape_is_refused() -> None:
    twins = prefilled(Twins({**LLAMA, "num_hidden_layers": 1}), 3, 4)
    twins.decode(0, 1)
    batch, other = (
        twins.sequences.batch(ForwardMode.DECODE, rows) for rows in ({0: 1, 1: 1}, {0: 1})
    )
    (stage,) = twins.recorded
    stage.attention.plan(other)
    batch.plan_mark = other.plan_mark
    with pytest.raises(
        StalePlanError, match="planned for 1 rows and 1 tokens, the batch has 2 and 2"
    ):
        stage.executor.run(batch)


def test_chains_over_ends_of_pages_are_replayed() -> None:
    """Tokens so many that those of a prompt would be written page by page."""
    twins = prefilled(Twins(LLAMA), 5, 13, 14)
    parents = tuple(range(-1, 9))
    for rows in ((0, 1), (1, 2), (0, 2)):
        twins.step(
            ForwardMode.VERIFY, dict.fromkeys(rows, 10), parents=dict.fromkeys(rows, parents)
        )
    assert twins.counts() == (1, 2)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_hidden_states_of_other_tokens_are_refused(num_tokens: int) -> None:
    twins = prefilled(Twins({**LLAMA, "num_hidden_layers": 2}, cuts=(1,)), 3, 4)
    twins.decode(0, 1)
    batch = replace(twins.sequences.batch(ForwardMode.DECODE, {0: 1, 1: 1}), token_ids=None)
    with pytest.raises(InternalError, match="needs hidden states of 2 tokens"):
        twins.recorded[1].executor.run(batch, StageOutput(hidden=torch.zeros(num_tokens, 64)))
