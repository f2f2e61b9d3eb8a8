"""Kernels as the GPU runs them: the same checks as in the interpreter, at the sizes of real
models."""

import pytest
import torch

from engine.backends.cpu.recurrent import CpuRecurrent
from engine.core.batch import ForwardMode
from engine.core.numerics import Numerics
from tests.support.kernels.batches import Row, make_batch

HEADS_K, HEADS_V, DIM, KERNEL, LAYER = 4, 8, 128, 4, 0
CHANNELS = 2 * HEADS_K * DIM + HEADS_V * DIM


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_recurrent_layers_agree_with_the_cpu(device: torch.device) -> None:
    from engine.backends.cuda.recurrent import DeviceRecurrent

    conv = draw(6, KERNEL - 1, CHANNELS, seed=1)
    state = draw(6, HEADS_V, DIM, DIM, seed=2) * 0.1
    cpu = CpuRecurrent(
        conv_pools={LAYER: conv}, state_pools={LAYER: state}, numerics=Numerics.EXACT
    )
    conv_d, state_d = conv.to(device), state.to(device)
    gpu = DeviceRecurrent(conv_pools={LAYER: conv_d}, state_pools={LAYER: state_d})
    weight = draw(CHANNELS, KERNEL, seed=3)
    for mode, rows in (
        (ForwardMode.PREFILL, [Row(200, 0, slot=1), Row(70, 128, slot=3), Row(1, 64, slot=4)]),
        (ForwardMode.DECODE, [Row(1, 200, slot=1), Row(1, 198, slot=3)]),
    ):
        batch = make_batch(mode, rows)
        count = batch.num_tokens
        x = draw(count, CHANNELS, seed=count)
        q, k = draw(2, count, HEADS_K, DIM, seed=count + 1)
        v = draw(count, HEADS_V, DIM, seed=count + 2)
        g, beta = (
            -draw(count, HEADS_V, seed=count + 3).abs() * 0.1,
            draw(count, HEADS_V, seed=count + 4).sigmoid(),
        )
        expected = cpu.causal_conv(LAYER, x, weight, batch)
        actual = gpu.causal_conv(LAYER, x.to(device), weight.to(device), batch)
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
        expected = cpu.gated_delta_rule(LAYER, q, k, v, g, beta, batch)
        moved = [part.to(device) for part in (q, k, v, g, beta)]
        actual = gpu.gated_delta_rule(
            LAYER, moved[0], moved[1], moved[2], moved[3], moved[4], batch
        )
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(conv_d.cpu(), conv)
    torch.testing.assert_close(state_d.cpu(), state, rtol=1e-3, atol=1e-4)


def test_keys_and_values_go_to_their_pages(device: torch.device) -> None:
    from engine.kernels.device.cache import write_kv

    pool = draw(33, 2, 8, 16, 128, seed=1).bfloat16().to(device)
    k, v = draw(2, 5, 8, 128, seed=2).bfloat16().to(device)
    pages, offsets = (
        torch.tensor([1, 1, 2, 9, 9], device=device),
        torch.tensor([0, 5, 15, 2, 3], device=device),
    )
    write_kv(pool, k, v, pages, offsets)
    assert torch.equal(pool[pages, 0, :, offsets], k)
    assert torch.equal(pool[pages, 1, :, offsets], v)


@pytest.mark.parametrize("num_keys", [1, 100, 2048])
def test_listed_attention_in_bf16(device: torch.device, num_keys: int) -> None:
    from engine.kernels.device.latent import listed_attention

    entries = draw(4096, 576, seed=1).bfloat16()
    q = draw(3, 128, 576, seed=2).bfloat16() * 0.2
    keys = torch.stack(
        [
            torch.randperm(4096, generator=torch.Generator().manual_seed(row))[:num_keys]
            for row in range(3)
        ]
    ).int()
    out = listed_attention(
        q.to(device), entries.to(device), keys.to(device), latent_dim=512, scale=0.05
    ).cpu()
    for token in range(3):
        own = entries[keys[token].long()].double()
        weights = (q[token].double() @ own.T * 0.05).softmax(-1)
        assert (out[token].double() - weights @ own[:, :512]).abs().max() < 0.03
