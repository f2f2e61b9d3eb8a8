"""Inputs of recurrent layers, and their definition token by token in fp64."""

import math

import torch
from torch import Tensor

from engine.contracts.recurrent import RecurrentBackend
from engine.core.batch import ForwardMode
from tests.support.kernels.batches import Row, make_batch

LAYER, KERNEL, CHANNELS = 2, 4, 24
K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 16, 8
NUM_SLOTS = 8


class Tokens:
    """One request's inputs to both operations, with what came out so far."""

    def __init__(
        self,
        num_tokens: int,
        *,
        seed: int,
        slot: int,
        by_channel: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(num_tokens, *shape, generator=generator)

        self.inputs = (
            draw(K_HEADS, K_DIM).to(dtype),
            draw(K_HEADS, K_DIM).to(dtype),
            draw(V_HEADS, V_DIM).to(dtype),
            -draw(V_HEADS, *[K_DIM] * by_channel).abs() * 0.3,
            draw(V_HEADS).sigmoid(),
        )
        self.x = draw(CHANNELS).to(dtype)
        self.slot, self.fed = slot, 0
        self.conv: list[Tensor] = []
        self.out: list[Tensor] = []


WEIGHT = torch.randn(CHANNELS, KERNEL, generator=torch.Generator().manual_seed(99))


def feed(recurrent: RecurrentBackend, mode: ForwardMode, *parts: tuple[Tokens, int]) -> None:
    batch = make_batch(mode, [Row(count, tokens.fed, slot=tokens.slot) for tokens, count in parts])
    x = torch.cat([tokens.x[tokens.fed : tokens.fed + count] for tokens, count in parts])
    q, k, v, g, beta = (
        torch.cat([tokens.inputs[i][tokens.fed : tokens.fed + count] for tokens, count in parts])
        for i in range(5)
    )
    conv = recurrent.causal_conv(LAYER, x, WEIGHT, batch)
    out = recurrent.gated_delta_rule(LAYER, q, k, v, g, beta, batch)
    counts = [count for _, count in parts]
    pieces = zip(parts, torch.split(conv, counts), torch.split(out, counts), strict=True)
    for (tokens, count), conv_part, out_part in pieces:
        tokens.conv.append(conv_part)
        tokens.out.append(out_part)
        tokens.fed += count


def delta_rule(tokens: Tokens, count: int) -> tuple[Tensor, Tensor]:
    """Compute the definition, one token at a time, in fp64; return outputs and the last state."""
    share = V_HEADS // K_HEADS
    q, k, v, g, beta = (x[:count].double() for x in tokens.inputs)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(share, 1) for x in (q / math.sqrt(K_DIM), k))
    out = torch.zeros(count, V_HEADS, V_DIM, dtype=torch.float64)
    state = torch.zeros(V_HEADS, K_DIM, V_DIM, dtype=torch.float64)
    for t in range(count):
        state *= g[t].exp().view(V_HEADS, -1, 1)
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state += torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out, state


def convolution(tokens: Tokens, count: int) -> Tensor:
    """Compute the definition in fp64: zeros before the first token, one filter per channel."""
    padded = torch.cat([torch.zeros(KERNEL - 1, CHANNELS), tokens.x[:count]]).double()
    total = torch.stack([(padded[t : t + KERNEL] * WEIGHT.T.double()).sum(0) for t in range(count)])
    return total / (1 + torch.exp(-total))
