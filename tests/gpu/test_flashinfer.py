"""Attention by the real FlashInfer against dense attention in fp64, bf16 keys and values."""

import pytest
import torch
from torch import Tensor

from engine.backends.cuda.flashinfer import FlashInferAttention
from engine.backends.cuda.wrappers import FlashInferWrappers
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardMode
from runtime.errors import StalePlanError
from tests.support.kernels.attention import LAYER, Prompt, dense, make_prompt, tree_info
from tests.support.kernels.batches import Row, make_batch

# Products of bf16 with fp32 sums: three decimal places of values around one.
ATOL = 0.02
GEOMETRY = AttentionGeometry(
    num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, scale=128**-0.5
)


def build(
    device: torch.device, geometry: AttentionGeometry = GEOMETRY
) -> tuple[FlashInferAttention, Tensor]:
    from engine.kernels.device.cache import write_kv  # only here is there a device to run it on

    shape = (64, 2, geometry.num_kv_heads, geometry.page_size, geometry.head_dim)
    pool = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
    backend = FlashInferAttention(
        kv_pools={LAYER: pool},
        geometry=geometry,
        wrappers=FlashInferWrappers(device),
        device=device,
        write_kv=write_kv,
    )
    return backend, pool


def feed(
    backend: FlashInferAttention,
    mode: ForwardMode,
    device: torch.device,
    *parts: tuple[Prompt, int],
    trees: tuple[tuple[int, ...], ...] | None = None,
) -> None:
    rows = [Row(count, prompt.fed, prompt.pages) for prompt, count in parts]
    batch = make_batch(mode, rows, spec_info=None if trees is None else tree_info(*trees))
    backend.plan(batch)
    q, k, v = (
        torch.cat(
            [getattr(prompt, name)[prompt.fed : prompt.fed + count] for prompt, count in parts]
        ).to(device)
        for name in ("q", "k", "v")
    )
    out = backend.run(LAYER, q, k, v, batch).cpu()
    for (prompt, count), piece in zip(parts, out.split([count for _, count in parts]), strict=True):  # type: ignore[no-untyped-call]
        prompt.fed += count
        prompt.out.append(piece)


def check(prompt: Prompt, visible: Tensor | None = None) -> None:
    expected = dense(prompt, GEOMETRY, visible=visible)
    assert (prompt.output().double() - expected).abs().max() < ATOL


def prompts(*lengths: int) -> list[Prompt]:
    return [
        make_prompt(
            length, GEOMETRY, pages=range(1 + 9 * row, 10 + 9 * row), seed=row, dtype=torch.bfloat16
        )
        for row, length in enumerate(lengths)
    ]


def test_prefill_in_chunks_then_decode(device: torch.device) -> None:
    backend, _ = build(device)
    first, second = prompts(120, 75)
    feed(backend, ForwardMode.PREFILL, device, (first, 33), (second, 70))
    feed(backend, ForwardMode.PREFILL, device, (first, 80))
    for _ in range(5):
        feed(backend, ForwardMode.DECODE, device, (first, 1), (second, 1))
    feed(backend, ForwardMode.DECODE, device, (first, 1))
    feed(backend, ForwardMode.DECODE, device, (first, 1))
    check(first)
    check(second)


def test_a_tree_sees_its_ancestors(device: torch.device) -> None:
    backend, _ = build(device)
    tree = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    ).bool()
    prompt, other = prompts(66, 40)
    feed(backend, ForwardMode.PREFILL, device, (prompt, 61), (other, 35))
    feed(
        backend, ForwardMode.VERIFY, device, (prompt, 5), (other, 5), trees=((-1, 0, 0, 1, 2),) * 2
    )
    for each in (prompt, other):
        visible = torch.ones(len(each.q), len(each.q), dtype=torch.bool).tril()
        visible[-5:, -5:] = tree
        check(each, visible)


def test_two_batches_in_flight_and_never_a_third(device: torch.device) -> None:
    backend, _ = build(device)
    batches = [make_batch(ForwardMode.DECODE, [Row(1, 3 + row, (row + 1,))]) for row in range(3)]
    q, kv = (torch.ones(1, heads, 128, dtype=torch.bfloat16, device=device) for heads in (8, 2))
    backend.plan(batches[0])
    backend.plan(batches[1])
    assert backend.run(LAYER, q, kv, kv, batches[0]).shape == (1, 8, 128)
    backend.plan(batches[2])
    assert backend.run(LAYER, q, kv, kv, batches[1]).shape == (1, 8, 128)
    with pytest.raises(StalePlanError):
        backend.run(LAYER, q, kv, kv, batches[0])
