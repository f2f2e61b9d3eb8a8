"""Real CUDA graphs against eager forwards of the same stages, like `tests/engine/graphs` with its
fake."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from engine.core.batch import ForwardMode, GraphBucket
from engine.graphs.buckets import verify_buckets
from engine.graphs.capture import CudaCapture
from runtime.errors import ConfigError
from tests.support.models.tiny_models import HYBRID, LLAMA

# FlashInfer has no heads of 32.
DENSE = {**LLAMA, "head_dim": 64}
MIXED = {**HYBRID, "head_dim": 64}


@pytest.mark.parametrize("config", [DENSE, MIXED], ids=["attention", "hybrid"])
def test_s1_3_small_batches_and_changed_lengths_replay_in_big_graphs(
    config: dict[str, object], device: torch.device
) -> None:
    from tests.support.device.captured_stage import Twins, prefilled

    twins = prefilled(Twins(config, device=device), 3, 15, 16)
    for rows in ((0, 1), (0, 1, 2), (2,), (2, 0), (0, 1, 2)):
        twins.step(ForwardMode.DECODE, dict.fromkeys(rows, 1))
    assert twins.num_replays() == 5


@pytest.mark.parametrize("is_masked", [False, True], ids=["chains", "trees"])
def test_s1_10_stale_rows_of_the_stage_before_do_not_leak_into_a_verify(
    device: torch.device, *, is_masked: bool
) -> None:
    from tests.support.device.captured_stage import MAX_ROWS, NODES, Twins, prefilled

    twins = prefilled(
        Twins(
            MIXED,
            cuts=(2,),
            buckets=verify_buckets(MAX_ROWS, NODES, is_masked=is_masked),
            capture_layers=frozenset({0, 3}),
            device=device,
        ),
        3,
        15,
        16,
    )
    fork = (-1, 0, 0, 1) if is_masked else (-1, 0, 1, 2)
    steps: list[dict[int, tuple[int, ...]]] = [
        {0: (-1, 0, 1, 2), 1: fork, 2: fork},
        {1: (-1, 0)},
        {2: fork, 0: (-1,)},
        {0: (-1,), 1: (-1,)},
    ]
    for shapes in steps:
        twins.step(
            ForwardMode.VERIFY,
            {key: len(parents) for key, parents in shapes.items()},
            parents=shapes,
        )
    assert twins.num_replays() == 8


def refused_capture() -> str:
    device = torch.device("cuda", 0)
    values = torch.ones(3, device=device)

    def reads_a_value() -> None:
        values.mul_(values.sum().item())

    with pytest.raises(ConfigError) as refused:
        CudaCapture(device).capture(str(GraphBucket(ForwardMode.DECODE, 4)), reads_a_value)
    return str(refused.value)


@pytest.mark.usefixtures("device")
def test_a_failed_capture_names_its_bucket() -> None:
    """In a process of its own, because torch is unusable after a capture that failed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        message = process.submit(refused_capture).result(60)
    assert re.fullmatch(r"the CUDA graph for decode of 4 x 1.*--no-cuda-graphs", message)


@pytest.mark.parametrize("topk", [1, 3])
def test_a_round_reads_committed_keys_in_place(device: torch.device, topk: int) -> None:
    from engine.backends.cuda.wrappers import FlashInferWrappers
    from engine.contracts.attention import AttentionGeometry
    from engine.speculative.attention.draft_attention import RoundAttention
    from engine.speculative.attention.multistep import MultiStepAttention
    from engine.speculative.attention.multistep_device import DeviceRounds
    from tests.engine.speculative.test_multistep_device import round_of

    geometry = AttentionGeometry(num_heads=6, num_kv_heads=2, head_dim=64, page_size=4, scale=0.1)
    pools = {0: torch.randn(10, 2, 2, 4, 64, device=device, dtype=torch.bfloat16)}
    in_place = DeviceRounds(
        kv_pools=pools, geometry=geometry, wrappers=FlashInferWrappers(device), device=device
    )
    backends: tuple[RoundAttention, ...] = (
        in_place,
        MultiStepAttention(kv_pools=pools, geometry=geometry),
    )
    batches = [round_of((4, 11, 6), topk) for _ in backends]
    for backend, batch in zip(backends, batches, strict=True):
        backend.plan(batch)
    for _ in range(3):
        q = torch.randn(3 * topk, 6, 64, device=device, dtype=torch.bfloat16)
        k, v = torch.randn(2, 3 * topk, 2, 64, device=device, dtype=torch.bfloat16)
        actual, expected = (
            backend.run(0, q, k, v, batch) for backend, batch in zip(backends, batches, strict=True)
        )
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
