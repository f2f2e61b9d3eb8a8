"""Causal convolution of whole prompts: outputs of all tokens at once, then each row's history."""

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def conv_prefill(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    fresh: Tensor,
    query_lens: tuple[int, ...],
) -> Tensor:
    """Convolve, apply SiLU, write the new histories and return [T, C].

    x is [T, C]; weight is [C, K]; states is [records, K - 1, C]; slots is [R] int64 and fresh [R]
    bool, as in `delta_chunks`.
    """
    out = torch.empty_like(x)
    rows = [row for row, length in enumerate(query_lens) if length]
    if not rows:
        return out
    lengths = torch.tensor([query_lens[row] for row in rows], device=x.device)
    chosen = torch.tensor(rows, device=x.device)
    stops = lengths.cumsum(0)
    starts = stops - lengths
    blocks = triton.cdiv(x.shape[1], _CHANNELS)
    # With a given output size the host does not wait for the device to compute it.
    spread = [
        torch.repeat_interleave(values, lengths, output_size=len(x))
        for values in (slots[chosen], fresh[chosen], starts)
    ]
    conv_prefill_kernel[len(x), blocks](
        x, weight, states, *spread, out, x.shape[1], KERNEL=weight.shape[1], BLOCK=_CHANNELS
    )
    conv_history_kernel[len(rows), blocks](
        x,
        states,
        slots[chosen],
        fresh[chosen],
        starts,
        stops,
        x.shape[1],
        KERNEL=weight.shape[1],
        BLOCK=_CHANNELS,
    )
    return out
