"""A stage asks for the kernels of its own layers, by what they cache and what its role does."""

from pathlib import Path

import pytest
import torch

from decode.worker import DecodeRole
from engine.kernels.host.aot.kernel_list import Kernel
from engine.kernels.host.attention import mla, paged_attention, sparse_index
from engine.kernels.host.codegen import program
from engine.kernels.host.linear import packed_linear_kernel, packing
from engine.kernels.host.recurrent import causal_conv, delta_rule, gates
from engine.kernels.host.tokens import kv_writes, norm_rope, row_ops, sampling
from pool.role import PoolRole
from pool.stage import kernels as stage_kernels
from pool.stage.config import WorkerConfig
from pool.stage.kernels import compile_kernels
from pool.stage.plan import plan_stage
from prefill.worker import PrefillRole
from tests.support.models.checkpoints import make_checkpoint

ALWAYS = {packed_linear_kernel.compiled_for, packing.compiled, sampling.compiled}
RECURRENT = {causal_conv.compiled_for, gates.gates_for, gates.norm_for}
ATTENDS = {paged_attention.compiled_for, norm_rope.tables_for, kv_writes.writes_for}
STEPS = {program.load_runner, row_ops.sum_for, row_ops.copies_for, row_ops.gathers_for}


@pytest.mark.parametrize(
    ("family", "role", "called"),
    [
        ("llama", PrefillRole(), ATTENDS),
        ("qwen3_5", PrefillRole(), {*ATTENDS, delta_rule.chunks_for, *RECURRENT}),
        ("qwen3_5", DecodeRole(), {*ATTENDS, delta_rule.steps_for, *RECURRENT, *STEPS}),
        (
            "deepseek_v32",
            DecodeRole(),
            {
                mla.compiled_for,
                sparse_index.scores_for,
                sparse_index.choice,
                norm_rope.tables_for,
                *STEPS,
            },
        ),
    ],
)
def test_kernels_a_stage_will_call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    role: PoolRole,
    called: set[object],
) -> None:
    asked: list[Kernel] = []
    monkeypatch.setattr(stage_kernels, "compile_ahead", asked.extend)
    config = WorkerConfig(model=make_checkpoint(tmp_path, family), num_pages=8)
    compile_kernels(config, plan_stage(config), reads_prompts=role.reads_prompts)
    assert {kernel.function for kernel in asked} == ALWAYS | called
    assert {kernel.arguments for kernel in asked} <= {(), (torch.float32,), (torch.float32,) * 2}


def test_a_stage_of_recurrent_layers_does_not_wait_for_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Kernel] = []
    monkeypatch.setattr(stage_kernels, "compile_ahead", asked.extend)
    config = WorkerConfig(
        model=make_checkpoint(tmp_path, "qwen3_5"), world_size=4, partition="1,1,1,1", num_pages=8
    )
    compile_kernels(config, plan_stage(config), reads_prompts=True)
    assert {kernel.function for kernel in asked} == ALWAYS | RECURRENT | {delta_rule.chunks_for}
