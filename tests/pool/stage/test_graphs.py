"""Captures of stages by device, flag, model and speculation."""

from pathlib import Path

import pytest
import torch

from engine.assembly.backend_set import Capturable, StageBackends, StageCaches
from engine.assembly.cpu import CpuBackends
from engine.core.batch import ForwardMode
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from engine.graphs.runner import StageGraphs
from engine.speculative.contracts.config import SpeculationConfig
from pool.stage.config import WorkerConfig
from pool.stage.graphs import build_graphs
from tests.support.device.capture import RecordingCapture
from tests.support.device.captured_stage import CPU, NODES, DeviceStage
from tests.support.models.tiny_models import LLAMA, QWEN3_MOE, tiny


def built(
    model: dict[str, object], *, topk: int = 0, capturable: bool = True, cuda_graphs: bool = True
) -> tuple[StageGraphs | None, RecordingCapture]:
    """Return the captures of a stage of one layer; `topk` 0 disables speculation."""
    description = tiny({**model, "num_hidden_layers": 1})
    stage = DeviceStage(description, LayerRange(0, 1), max_nodes=NODES)
    capture = RecordingCapture([stage.attention])
    parts = Capturable(stage.attention, stage.recurrent, capture, CPU) if capturable else None
    config = WorkerConfig(model=Path("unused"), max_running=5, cuda_graphs=cuda_graphs)
    speculation = SpeculationConfig(Path("unused"), topk, 3, NODES - 1) if topk else None
    backends = StageBackends(stage.attention, None, stage.recurrent, capturable=parts)
    return build_graphs(config, description, stage.executor.model, backends, speculation), capture


def test_decode_is_captured_for_each_doubling_up_to_max_running() -> None:
    graphs, capture = built(LLAMA)
    assert graphs is not None
    assert [graph.name for graph in capture.graphs] == [
        f"decode of {rows} x 1 tokens" for rows in (5, 4, 2, 1)
    ]


@pytest.mark.parametrize(("topk", "kind"), [(1, ""), (2, " in trees")])
def test_a_pool_that_speculates_captures_verification_too(topk: int, kind: str) -> None:
    graphs, capture = built(LLAMA, topk=topk)
    assert graphs is not None
    names = {f"{ForwardMode.VERIFY} of {rows} x {NODES} tokens{kind}" for rows in (5, 4, 2, 1)}
    assert {graph.name for graph in capture.graphs if graph.name.startswith("verify")} == names
    assert len(capture.graphs) == 8


def test_no_graph_is_captured_if_disabled_or_experts_are_counted_on_host() -> None:
    for graphs, capture in (
        built(LLAMA, capturable=False),
        built(LLAMA, cuda_graphs=False),
        built(QWEN3_MOE),
    ):
        assert graphs is None
        assert capture.graphs == []


def test_backends_of_the_host_offer_nothing_to_capture() -> None:
    geometry = tiny(LLAMA).attention_geometry(16)
    kv = {0: torch.zeros(3, 2, 2, 16, 32)}
    backends = CpuBackends(Numerics.EXACT).of_stage(
        StageCaches(kv, {}, {}, {}, {}, {}), geometry, None, max_nodes=0, num_scratch=0
    )
    assert backends.capturable is None
