"""Work of a stage around its layers: first-layer work, signals, captures, empty batches, wrong
calls."""

import importlib
import inspect
import pkgutil
from collections import Counter
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor

import models
from engine.contracts.model import ForwardContext, StageOutput
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecRow
from engine.core.layer_range import LayerRange, get_pp_indices
from engine.core.rows import Row, build_batch
from models.blocks.rotary import Rotary, RotaryTable
from models.loader import ModelDescription, read_model
from runtime.errors import ConfigError, InternalError
from tests.models.conftest import CheckpointMaker
from tests.support.drafts.drafters import CHAINS, OracleDrafter
from tests.support.models.single_stage import StageDriver
from tests.support.models.tiny_models import HYBRID, tiny
from tests.support.pool.local_pool import Speculation, build_executor


@pytest.fixture(params=["llama", "qwen3_5_text"])
def model(request: pytest.FixtureRequest, checkpoint: CheckpointMaker) -> ModelDescription:
    return read_model(checkpoint(request.param))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_one_layer_per_stage_does_first_layer_work_s0_5(
    model: ModelDescription, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[Tensor] = []
    original = Rotary.table

    def counting(self: Rotary, positions: Tensor) -> RotaryTable:
        tables.append(positions.clone())
        return original(self, positions)

    monkeypatch.setattr(Rotary, "table", counting)
    cuts = [get_pp_indices(4, rank, num_stages).start for rank in range(1, num_stages)]
    driver = StageDriver(model, cuts=cuts)
    for stage in driver.stages:
        assert {layer.start_layer for layer in stage.layers} == {stage.layer_range.start}
    driver.prefill({0: list(range(3, 67))}, samples=False)
    driver.prefill({0: [5, 6, 7]})
    driver.decode({0: 9})
    expected = [torch.arange(64), torch.arange(64, 67), torch.arange(67, 68)]
    assert len(tables) == 3 * num_stages
    for index, positions in enumerate(tables):
        assert torch.equal(positions, expected[index // num_stages])


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_first_layer_work_is_repeated_for_every_tree_s0_5(
    num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification: positions go by depth, and each stage makes its table for the tree at hand,
    once."""
    tables: list[list[int]] = []
    original = Rotary.table

    def counting(self: Rotary, positions: Tensor) -> RotaryTable:
        tables.append(positions.tolist())
        return original(self, positions)

    speculation = Speculation(
        drafter=lambda num_pages: OracleDrafter(CHAINS["chain 3"]), num_draft_tokens=3
    )
    stages = [
        build_executor(
            tiny(HYBRID),
            get_pp_indices(5, rank, num_stages),
            page_size=16,
            num_pages=4,
            num_slots=2,
            speculation=speculation,
        )[0]
        for rank in range(num_stages)
    ]
    monkeypatch.setattr(Rotary, "table", counting)

    def run(
        mode: ForwardMode, num_tokens: int, context_len: int, parents: tuple[int, ...] = ()
    ) -> None:
        output: StageOutput | None = None
        for stage in stages:
            row = Row(
                1,
                list(range(3, 3 + num_tokens)),
                context_len,
                [1, 2],
                1,
                None,
                SpecRow(parents, scratch=1),
            )
            output = stage.run(build_batch(mode, [row]), output)

    run(ForwardMode.PREFILL, 7, 0)
    run(ForwardMode.VERIFY, 4, 7, (-1, 0, 0, 2))
    run(ForwardMode.VERIFY, 3, 7, (-1, 0, 1))
    expected = [[0, 1, 2, 3, 4, 5, 6], [7, 8, 8, 9], [7, 8, 9]]
    assert tables == [positions for positions in expected for _ in range(num_stages)]


@pytest.mark.parametrize("cuts", [(1, 3), (1, 2, 3)])
def test_start_layer_is_given_at_construction_s0_6(
    model: ModelDescription, cuts: tuple[int, ...]
) -> None:
    """Nothing a batch or its pools say changes it: stages over pools of the whole model do what
    they did."""
    carried = {field.name for type_ in (ForwardBatch, ForwardContext) for field in fields(type_)}
    assert not {
        name for name in carried if "start" in name or "layer_range" in name or "pool" in name
    }
    driver, other = StageDriver(model, cuts=cuts), StageDriver(model, cuts=cuts)
    expected = driver.prefill({0: [5, 6, 7]})
    whole = StageDriver(model).stages[0]
    other.contexts = [other._context(model, whole, 16) for _ in other.stages]
    assert torch.equal(other.prefill({0: [5, 6, 7]}), expected)
    assert [{layer.start_layer for layer in stage.layers} for stage in other.stages] == [
        {0},
        *({cut} for cut in cuts),
    ]


def test_layers_report_in_order_once_their_cache_is_complete(model: ModelDescription) -> None:
    driver = StageDriver(model, cuts=(1, 3))
    driver.prefill({0: [5, 6, 7]})
    assert driver.layers_done == [0, 1, 2, 3]
    driver.decode({0: 8})
    assert Counter(driver.layers_done) == Counter([0, 1, 2, 3] * 2)


def test_only_rows_that_draw_give_logits(model: ModelDescription) -> None:
    driver = StageDriver(model)
    alone = driver.prefill({0: [5, 6, 7]})
    batch = driver.batch(ForwardMode.PREFILL, {1: [9, 10], 2: [5, 6, 7]}, samples=True)
    batch.sampling = (None, batch.sampling[1])
    logits = driver.run(batch).logits
    assert logits is not None
    assert logits.dtype is torch.float32
    assert torch.equal(logits, alone)
    assert driver.prefill({3: [8]}, samples=False).shape == (0, model.facts.vocab_size)


def test_captured_layer_outputs_travel_to_the_last_stage_s0_9(model: ModelDescription) -> None:
    wanted = frozenset({0, 2, 3})
    whole = StageDriver(model, capture_layers=wanted)
    expected = whole.run(whole.batch(ForwardMode.PREFILL, {0: [5, 6, 7]}, samples=True)).aux_hidden
    assert {layer_id: len(hidden) for layer_id, hidden in expected.items()} == dict.fromkeys(
        wanted, 3
    ), "of all tokens, though only the last one draws"
    for cuts in ((1,), (3,), (1, 2, 3)):
        driver = StageDriver(model, cuts=cuts, capture_layers=wanted)
        captured = driver.run(
            driver.batch(ForwardMode.PREFILL, {0: [5, 6, 7]}, samples=True)
        ).aux_hidden
        assert set(captured) == wanted
        assert all(torch.equal(captured[layer_id], expected[layer_id]) for layer_id in wanted)
    # The output of a stage's last layer is what the next stage gets.
    front = StageDriver(model, cuts=(1,), capture_layers=wanted)
    batch = front.batch(ForwardMode.PREFILL, {0: [5, 6, 7]}, samples=True)
    front.plan(0, batch)
    output = front.stages[0].forward(batch, None, front.contexts[0])
    assert output.hidden is not None
    assert torch.equal(output.aux_hidden[0], output.hidden)


def test_a_batch_without_tokens_passes_every_stage(model: ModelDescription) -> None:
    driver = StageDriver(model, cuts=(2,), capture_layers=frozenset({1}))
    output = driver.run(driver.batch(ForwardMode.IDLE, {}, samples=False))
    assert output.logits is not None
    assert output.logits.shape == (0, model.facts.vocab_size)
    assert output.aux_hidden[1].shape == (0, model.facts.hidden_size)
    assert driver.layers_done == []


def test_a_stage_needs_its_input(model: ModelDescription) -> None:
    driver = StageDriver(model, cuts=(2,))
    batch = driver.batch(ForwardMode.PREFILL, {0: [5, 6, 7]}, samples=True)
    with pytest.raises(InternalError, match="2-4 needs hidden states of 3 tokens"):
        driver.stages[1].forward(batch, None, driver.contexts[1])
    batch.token_ids = None
    with pytest.raises(InternalError, match="0-2 needs token ids"):
        driver.stages[0].forward(batch, None, driver.contexts[0])


@pytest.mark.parametrize("layers", [LayerRange(0, 5), LayerRange(2, 2)])
def test_impossible_stage_is_refused(model: ModelDescription, layers: LayerRange) -> None:
    with pytest.raises(ConfigError, match="not a stage of a model with 4 layers"):
        model.load_stage(layers, numerics=StageDriver(model).numerics)


def test_constructors_take_names_so_that_no_argument_can_slip_s0_8() -> None:
    """A parameter added between others shifts positional arguments; a single one cannot be
    confused."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(models.__path__, "models.")
        if "__main__" not in module.name
    ]
    built = [
        (cls, parameters)
        for module in modules
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and cls.__module__ == module.__name__
        and not is_dataclass(cls)
        and {"weights", "files"} & (parameters := inspect.signature(cls).parameters).keys()
    ]
    assert {
        "DecoderStage",
        "DecoderLayer",
        "Attention",
        "GatedDeltaNet",
        "Mla",
        "Eagle1",
        "Eagle3",
        "Mtp",
    } <= {cls.__name__ for cls, _ in built}
    for cls, parameters in built:
        positional = [
            name
            for name, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        assert len(positional) < 2, f"{cls.__name__}: {positional}"
