"""Latent attention on a GPU at DeepSeek's shape, in bf16, against the CPU backend."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.latent import CpuLatentAttention
from engine.backends.cuda.latent import DeviceLatentAttention
from engine.backends.cuda.latent_wrappers import FlashInferLatentWrappers
from engine.contracts.latent import LatentAttentionBackend, LatentGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecRow
from engine.core.rows import Row, build_batch
from engine.kernels.device import latent as kernels
from testing.batches import unmarked

GEOMETRY = LatentGeometry(num_heads=16, latent_dim=512, rope_dim=64, page_size=64, scale=0.1)
INDEX_HEADS, INDEX_DIM = 16, 128
LENGTH = 400


def row(start: int, count: int, parents: tuple[int, ...] = ()) -> Row:
    return Row(
        1, [3] * count, start, [5, 2, 9, 1, 7, 3, 8], 0, None, SpecRow(parents) if parents else None
    )


STEPS = (
    build_batch(ForwardMode.PREFILL, [row(0, 300)]),
    build_batch(ForwardMode.PREFILL, [row(300, 90)]),
    build_batch(ForwardMode.DECODE, [row(390, 1)]),
    build_batch(ForwardMode.VERIFY, [row(391, 5, (-1, 0, 0, 1, 2))]),
)


def pools(device: torch.device, dim: int) -> dict[int, Tensor]:
    return {0: torch.zeros(10, GEOMETRY.page_size, dim, dtype=torch.bfloat16, device=device)}


def step(
    backend: LatentAttentionBackend, batch: ForwardBatch, device: torch.device, *, is_sparse: bool
) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(7)
    first, count = batch.context_lens[0], batch.num_tokens

    def draw(*shape: int) -> Tensor:
        return (
            torch.randn(LENGTH, *shape, generator=generator)
            .bfloat16()[first : first + count]
            .to(device)
        )

    q, entries = draw(16, GEOMETRY.entry_dim), draw(GEOMETRY.entry_dim)
    index_q, index_k, weights = (
        draw(INDEX_HEADS, INDEX_DIM),
        draw(INDEX_DIM),
        draw(INDEX_HEADS).float(),
    )
    backend.plan(batch)
    selected = backend.select(0, index_q, index_k, weights, batch) if is_sparse else None
    return backend.run(0, q, entries, selected, batch).cpu(), selected


@pytest.mark.parametrize("is_sparse", [False, True])
def test_prompts_decoding_and_trees(device: torch.device, *, is_sparse: bool) -> None:
    geometry = replace(GEOMETRY, max_selected=64 if is_sparse else 0)
    host = torch.device("cpu")
    expected = CpuLatentAttention(
        latent_pools=pools(host, geometry.entry_dim),
        index_pools=pools(host, INDEX_DIM),
        geometry=geometry,
    )
    backend = DeviceLatentAttention(
        latent_pools=pools(device, geometry.entry_dim),
        index_pools=pools(device, INDEX_DIM),
        geometry=geometry,
        wrappers=FlashInferLatentWrappers(device),
        device=device,
        kernels=kernels,
    )
    for batch in STEPS:
        (out, chosen), (reference, choice) = (
            step(backend, unmarked(batch), device, is_sparse=is_sparse),
            step(expected, unmarked(batch), host, is_sparse=is_sparse),
        )
        if (
            chosen is not None and choice is not None
        ):  # sums in another order may swap keys of nearly equal score
            pairs = zip(chosen.tolist(), choice.tolist(), strict=True)
            same = sum(len(set(a) & set(b)) / len(set(b)) for a, b in pairs)
            assert same / len(choice) > 0.98
        assert (out.float() - reference.float()).norm() < (
            0.1 if is_sparse else 0.02
        ) * reference.float().norm()
