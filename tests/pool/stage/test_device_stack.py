"""Whole models on the device's backends give what the host's give; and nothing on the way mixes
devices."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.assembly.cpu import CpuBackends
from engine.assembly.cuda import DeviceBackends
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import TokenTree
from engine.core.numerics import Numerics
from engine.core.request import SampledToken
from engine.kernels.device import cache, conv, delta, delta_chunks, latent, tree
from engine.memory.layout import CacheKind
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.eagle import EagleDrafter
from engine.speculative.trees.draft_handoff import HandedEnds
from engine.speculative.trees.proposal import Candidates
from models.drafts.loader import read_draft
from models.loader import ModelDescription, read_model
from tests.support.device.device_stack import (
    NUM_PAGES,
    NUM_SLOTS,
    PAGE,
    STEPS,
    build_stages,
    device_backends,
    logits_of,
)
from tests.support.device.one_device import DEVICE, KernelStandIn, OneDevice, WrapperStandIns
from tests.support.drafts.eagle import save_draft
from tests.support.models.checkpoints import make_checkpoint

ATOL = 2e-4  # fp32 in another order of operations; the logits are around one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


@pytest.mark.parametrize(
    ("family", "cuts"),
    [
        ("qwen3_5_text", (1, 3)),
        ("qwen3", ()),
        ("llama", (2,)),
        ("qwen3_moe", ()),
        ("deepseek_v3", (2,)),
    ],
)
def test_the_device_stack_gives_the_hosts_logits(
    folder: Path, family: str, cuts: tuple[int, ...]
) -> None:
    """Chunks of prompts, decoding, trees and what they leave to be committed."""
    description = read_model(make_checkpoint(folder, family))
    host = build_stages(description, CpuBackends(Numerics.EXACT), cuts=())
    device = build_stages(description, device_backends(), cuts=cuts)
    for number, step in enumerate(STEPS):
        expected, actual = logits_of(host, step), logits_of(device, step)
        assert actual.shape == expected.shape
        assert torch.allclose(actual, expected, rtol=0, atol=ATOL), f"step {number}"


KERNELS = {
    cache: ("write_kv_kernel",),
    conv: ("conv_prefill_kernel", "conv_history_kernel"),
    delta: ("conv_step_kernel", "delta_step_kernel"),
    delta_chunks: ("chunk_inverse_kernel", "chunk_prepare_kernel", "chunk_scan_kernel"),
    tree: ("conv_tree_kernel", "delta_tree_kernel"),
    latent: ("listed_attention_kernel", "index_scores_kernel"),
}
LAUNCHED = {
    "qwen3_5_text": {
        name for module, names in KERNELS.items() if module is not latent for name in names
    },
    "deepseek_v32": set(KERNELS[latent]),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, KernelStandIn]:
    stand_ins = {name: KernelStandIn() for names in KERNELS.values() for name in names}
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, stand_ins[name])
    return stand_ins


def watched_backends() -> DeviceBackends:
    return DeviceBackends(
        DEVICE, lambda geometry, pools: WrapperStandIns(), lambda geometry, pools: None
    )


def received(output: StageOutput) -> StageOutput:
    """Return the packet as the next stage gets it from a frame: on the host."""

    def there(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    return StageOutput(
        hidden=None if output.hidden is None else there(output.hidden),
        aux_hidden={layer_id: there(tensor) for layer_id, tensor in output.aux_hidden.items()},
    )


def last_outputs(
    description: ModelDescription, *, cuts: tuple[int, ...], capture_layers: frozenset[int]
) -> list[tuple[ForwardBatch, StageOutput]]:
    """Run every step through stages on the watched device."""
    stages = build_stages(description, watched_backends(), cuts=cuts, capture_layers=capture_layers)
    found = []
    for step in STEPS:
        output = StageOutput()
        with OneDevice() as watched:
            for rank, stage in enumerate(stages):
                batch = step.batch()
                if rank:
                    batch.token_ids = None
                output = stage.run(batch, received(output))
                assert {
                    tensor.device
                    for tensor in (*output.aux_hidden.values(), output.hidden, output.logits)
                    if tensor is not None
                } == {DEVICE}
        assert watched.num_on_device > 50
        found.append((step.batch(), output))
    return found


@pytest.mark.parametrize(
    ("family", "cuts"),
    [
        ("qwen3_5_text", (1, 3)),
        ("qwen3_moe", (1, 3)),
        ("llama_tied_bias", ()),
        ("deepseek_v32", (1, 3)),
    ],
)
def test_no_stage_mixes_devices(
    folder: Path, kernels: dict[str, KernelStandIn], family: str, cuts: tuple[int, ...]
) -> None:
    """First, middle and last stages. Reading back which expert got how many tokens is the one wait
    there is."""
    description = read_model(make_checkpoint(folder, family))
    outputs = last_outputs(description, cuts=cuts, capture_layers=frozenset({0, 1, 3}))
    assert all(output.logits is not None and output.logits.shape[0] for _, output in outputs[1:])
    launched = {name for name, stand_in in kernels.items() if stand_in.num_launches}
    assert launched == LAUNCHED.get(family, {"write_kv_kernel"})


@pytest.mark.parametrize("topk", [1, 2])
def test_no_draft_mixes_devices(
    folder: Path, kernels: dict[str, KernelStandIn], monkeypatch: pytest.MonkeyPatch, topk: int
) -> None:
    """Following prompts and trees, growing trees, and beginning from what was handed over."""
    target = read_model(make_checkpoint(folder, "llama"))
    draft = read_draft(save_draft(folder / f"eagle3-{topk}", layers=(0, 1, 3)), target)
    outputs = last_outputs(target, cuts=(2,), capture_layers=draft.capture_layers)
    model = draft.load(numerics=Numerics.FAST, device=DEVICE)
    (spec,) = draft.cache_specs(PAGE)
    pools = {CacheKind.KV: {0: torch.zeros(NUM_PAGES, *spec.record_shape, device=DEVICE)}}
    ends = HandedEnds(
        *(
            torch.zeros(NUM_SLOTS, width, dtype=dtype, device=DEVICE)
            for width, dtype in (
                (topk, torch.float32),
                (topk, torch.long),
                (draft.hidden_size, torch.float32),
            )
        )
    )
    attention = watched_backends().of_draft(model.attention_geometry(PAGE), pools)
    drafter = EagleDrafter(model=model, attention=attention, topk=topk, steps=3, handed=ends)
    grown: list[int] = []

    def trees(_: Candidates, num_nodes: list[int]) -> list[TokenTree]:
        grown.append(len(num_nodes))  # what grew stays on the device
        return [TokenTree()] * len(num_nodes)

    monkeypatch.setattr(Candidates, "trees", trees)
    with OneDevice():
        for batch, output in outputs:
            runs = (
                []
                if batch.sampling[0] is None
                else [AcceptedRun(row, [0], [SampledToken(5)]) for row in range(2)]
            )
            drafter.follow(batch, output, runs)
            drafter.propose(batch, output, runs)
        batch = outputs[-1][0]
        batch.mode = ForwardMode.PREBUILT
        drafter.begin(batch)
    assert grown == [2] * len(outputs)
