"""Causal convolution of whole prompts: outputs of all tokens at once, then each row's history."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.device.prompts import PromptRows

_CHANNELS = 256


@triton.jit
def conv_prefill_kernel(
    x,
    weight,
    states,
    slots,
    fresh,
    starts,
    out,
    num_channels,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the outputs only; one program per (token, block of channels).

    starts is [T], the first token of each token's row.
    """
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < num_channels
    start = tl.load(starts + token).to(tl.int64)
    record = tl.load(slots + token).to(tl.int64) * (KERNEL - 1) * num_channels
    old_channels = tl.where(tl.load(fresh + token) == 0, num_channels, 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(KERNEL):
        source = token - (KERNEL - 1) + tap
        in_new = channel < tl.where(source >= start, num_channels, 0)
        new = tl.load(x + source * num_channels + channel, mask=in_new, other=0.0)
        old_at = record + (source - start + KERNEL - 1) * num_channels + channel
        in_old = channel < tl.where(source < start, old_channels, 0)
        old = tl.load(states + old_at, mask=in_old, other=0.0)
        taps = tl.load(weight + channel * KERNEL + tap, mask=inside, other=0.0).to(tl.float32)
        total += (new.to(tl.float32) + old.to(tl.float32)) * taps
    tl.store(out + token * num_channels + channel, total / (1.0 + tl.exp(-total)), mask=inside)


@triton.jit
def conv_history_kernel(
    x, states, slots, fresh, starts, stops, num_channels, KERNEL: tl.constexpr, BLOCK: tl.constexpr
):
    """Store each row's last inputs as its history; one program per (row, block of channels)."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < num_channels
    start = tl.load(starts + row).to(tl.int64)
    stop = tl.load(stops + row).to(tl.int64)
    record = tl.load(slots + row).to(tl.int64) * (KERNEL - 1) * num_channels
    old_channels = tl.where(tl.load(fresh + row) == 0, num_channels, 0)
    # In ascending order an old input moves down, so its place was read before.
    for place in tl.static_range(KERNEL - 1):
        source = stop - (KERNEL - 1) + place
        in_new = channel < tl.where(source >= start, num_channels, 0)
        new = tl.load(x + source * num_channels + channel, mask=in_new, other=0.0)
        old_at = record + (source - start + KERNEL - 1) * num_channels + channel
        in_old = channel < tl.where(source < start, old_channels, 0)
        old = tl.load(states + old_at, mask=in_old, other=0.0)
        tl.store(states + record + place * num_channels + channel, new + old, mask=inside)


def conv_prefill(x: Tensor, weight: Tensor, states: Tensor, rows: PromptRows) -> Tensor:
    """Convolve, apply SiLU, write the new histories and return [T, C].

    x is [T, C]; weight is [C, K]; states is [records, K - 1, C].
    """
    out = torch.empty_like(x)
    if not len(x):
        return out
    blocks = triton.cdiv(x.shape[1], _CHANNELS)
    conv_prefill_kernel[len(x), blocks](
        x,
        weight,
        states,
        rows.token_slots,
        rows.token_fresh,
        rows.token_starts,
        out,
        x.shape[1],
        KERNEL=weight.shape[1],
        BLOCK=_CHANNELS,
    )
    conv_history_kernel[len(rows.slots), blocks](
        x,
        states,
        rows.slots,
        rows.fresh,
        rows.starts,
        rows.stops,
        x.shape[1],
        KERNEL=weight.shape[1],
        BLOCK=_CHANNELS,
    )
    return out
