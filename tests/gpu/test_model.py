"""Whole models on a GPU: the host's logits and tokens, stage by stage and through a cluster over
gRPC and UCX."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.assembly.backend_set import Backends
from engine.assembly.cpu import CpuBackends
from engine.core.batch import ForwardMode, SamplingRow
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from engine.core.request import SamplingParams
from engine.core.rows import Row
from engine.memory.layout import CacheKind
from engine.memory.pools import StagePools
from engine.pipeline.stage_executor import StageExecutor
from models.loader import read_model
from tests.support.device.device_stack import STEPS, Step, build_stage, build_stages, logits_of
from tests.support.models.tiny_models import HYBRID, LLAMA, QWEN3, QWEN3_MOE, tiny

DEMO = Path(__file__).parents[2] / "demo" / "model"
PROMPT = [5 + 7 * place % 700 for place in range(40)]
PAGES, SLOT, NUM_NEW, CLEAR = (3, 1, 7, 5, 9, 11), 2, 24, 0.25
_DRAW = SamplingRow(SamplingParams(), 0)


@pytest.fixture(scope="module")
def backends() -> Backends:
    from engine.assembly.cuda import DeviceBackends  # only here is there a device for it

    return DeviceBackends.on(torch.device("cuda", 0))


@pytest.mark.parametrize("config", [HYBRID, QWEN3, LLAMA, QWEN3_MOE])
def test_fp32_models_over_our_own_wrappers(backends: Backends, config: dict[str, object]) -> None:
    description = tiny(config)
    host = build_stages(description, CpuBackends(Numerics.EXACT), cuts=())
    device = build_stages(description, backends, cuts=(2,))
    for number, step in enumerate(STEPS):
        expected, actual = logits_of(host, step), logits_of(device, step).cpu()
        assert torch.allclose(actual, expected, rtol=0, atol=2e-3), f"step {number}"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("config", [HYBRID, QWEN3])
def test_bf16_models_over_flashinfer(
    backends: Backends, config: dict[str, object], head_dim: int
) -> None:
    """Compare both with fp32: the device's rounding costs no more than twice the host's."""
    narrow, wide = (
        tiny({**config, "head_dim": head_dim}, dtype) for dtype in ("bfloat16", "float32")
    )
    exact, host = (
        build_stages(description, CpuBackends(Numerics.EXACT), cuts=())
        for description in (wide, narrow)
    )
    device = build_stages(narrow, backends, cuts=(2,))
    for number, step in enumerate(STEPS):
        expected, rounded, actual = (
            logits_of(stages, step).float().cpu() for stages in (exact, host, device)
        )
        limit = 2 * (rounded - expected).norm(dim=-1) + 0.02 * expected.norm(dim=-1)
        assert ((actual - expected).norm(dim=-1) < limit).all(), f"step {number}"


def step(mode: ForwardMode, tokens: list[int], context_len: int) -> Step:
    return Step(mode, (Row(1, tokens, context_len, PAGES, SLOT, _DRAW),))


def hand_over(source: StagePools, targets: list[StagePools]) -> None:
    for pools in targets:
        for kind in CacheKind:
            records = list(PAGES) if kind.is_paged else [SLOT]
            for layer_id, cache in pools.of_kind(kind).items():
                cache[records] = source.of_kind(kind)[layer_id][records]


def stages_over(backends: Backends, *cuts: int) -> list[tuple[StageExecutor, StagePools]]:
    bounds = [0, *cuts, 8]
    return [
        build_stage(read_model(DEMO), backends, LayerRange(start, end))
        for start, end in pairwise(bounds)
    ]


def forced_logits(backends: Backends, tokens: list[int] | None) -> tuple[torch.Tensor, list[int]]:
    """Prefill in one stage and decode in two, fed with `tokens` or the sampled ones. Return logits
    [new, vocab] and tokens."""
    ((prefill, source),) = stages_over(backends)
    decode = stages_over(backends, 3)
    rows = [logits_of([prefill], step(ForwardMode.PREFILL, PROMPT, 0)).cpu()]
    hand_over(source, [pools for _, pools in decode])
    fed: list[int] = []
    for index in range(NUM_NEW):
        fed.append(int(rows[-1].argmax()) if tokens is None else tokens[index])
        rows.append(
            logits_of(
                [stage for stage, _ in decode],
                step(ForwardMode.DECODE, fed[-1:], len(PROMPT) + index),
            ).cpu()
        )
    return torch.cat(rows), fed


def test_the_demo_model_gives_the_hosts_tokens(backends: Backends) -> None:
    """Greedy; where the host's two best are closer than rounding, either is right."""
    expected, tokens = forced_logits(CpuBackends(Numerics.EXACT), None)
    actual, _ = forced_logits(backends, tokens)
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR
    assert clear.sum() > NUM_NEW / 2
    assert torch.equal(actual.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.usefixtures("whole_roles")
async def test_a_cluster_on_one_device() -> None:
    from baton.values import Query, Sampling, Stop
    from tests.support.cluster.one_process import cluster_in_process

    query = Query(prompt="3 5 7 9", sampling=Sampling(temperature=0.0), stop=Stop(max_tokens=12))
    answers = []
    for settings in ({}, {"device": "cuda", "numerics": "fast"}):
        async with cluster_in_process(
            DEMO, decode_pp=2, prefill=settings, decode=settings
        ) as client:
            answers.append((await client.complete(query, timeout_s=120)).token_ids)
    assert answers[0]
    assert answers[1] == answers[0]
