"""Both forms of the gated delta rule, on plain tensors in fp32.

Per token and value head: S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q, with S [dk, dv]
(Yang et al., Gated Delta Networks, 2024). A g for each row of S gives each key channel its own
decay (Kimi Linear, 2025). The chunked form gives the same result up to rounding, 64 tokens at a
time. With G the running sum of g inside a chunk and D_ij = e^(G_i - G_j) for j <= i, it solves the
unit lower triangular system (I + strict_lower(diag(beta) K K^T * D)) U = diag(beta) (V - (e^G K)
S). With a decay per channel, D is a factor inside the sum K K^T.

Here g is [..., w], where w is 1 or dk (`decays_of`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.delta_rule import CHUNK


def normalize_heads(q: Tensor, k: Tensor, num_v_heads: int) -> tuple[Tensor, Tensor]:
    """Normalize and repeat q and k, [T, Hk, dk] to fp32 [T, Hv, dk].

    Each head gets unit length (eps 1e-6 on the squared sum), and q is scaled by dk^-0.5. Each key
    head serves Hv / Hk consecutive value heads.
    """
    repeats = num_v_heads // q.shape[1]
    q = q.float()
    k = k.float()
    q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    return q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)


def decays_of(g: Tensor) -> Tensor:
    """Return a batch's g, [T, H] or [T, H, dk], with a last dimension: [T, H, 1] or [T, H, dk]."""
    return g[..., None] if g.dim() == 2 else g


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance each row by one token and return the output [R, H, dv] and the new state.

    q and k are [R, H, dk]; v is [R, H, dv]; g is [R, H, w]; beta is [R, H]; state is [R, H, dk,
    dv]. The computation uses elementwise products and sums over dk, so rows cannot influence each
    other's bits.
    """
    state = state * g.exp()[..., None]
    error = v - (state * k[..., None]).sum(-2)
    state = state + k[..., None] * (beta[..., None] * error)[..., None, :]
    return (state * q[..., None]).sum(-2), state


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk_counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Process whole prompts or pieces that are cut on the 64-token grid.

    The chunks of all rows are concatenated in the first dimension N, `chunk_counts` per row. A
    row's last chunk is padded with zeros: k, v, g and beta of 0 do not change the state. q and k
    are [N, H, 64, dk]; v is [N, H, 64, dv]; g is [N, H, 64, w]; beta is [N, H, 64]; state is [R, H,
    dk, dv]. Return the output [N, H, 64, dv] and the new state.
    """
    total = g.cumsum(-2)
    system = (beta[..., None] * _decayed_products(k, k, total)).tril(-1)
    # Both right-hand sides are solved at once, so that only small products depend on the running
    # state.
    sides = torch.cat([beta[..., None] * v, beta[..., None] * total.exp() * k], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    u_free = solved[..., : v.shape[-1]]
    u_state = solved[..., v.shape[-1] :]
    scores = _decayed_products(q, k, total)
    q_in = total.exp() * q
    k_out_t = (k * (total[..., -1:, :] - total).exp()).transpose(-1, -2).contiguous()
    chunk_decay = total[..., -1, :, None].exp()

    starts = [sum(chunk_counts[:row]) for row in range(len(chunk_counts))]
    out = torch.empty_like(v)
    state = state.clone()
    for index in range(max(chunk_counts, default=0)):
        rows = [row for row, count in enumerate(chunk_counts) if count > index]
        at = torch.tensor([starts[row] + index for row in rows])
        before = state[rows]
        u = u_free[at] - u_state[at] @ before
        out[at] = q_in[at] @ before + scores[at] @ u
        state[rows] = chunk_decay[at] * before + k_out_t[at] @ u
    return out, state


def _decayed_products(rows: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Return the decayed products of tokens with earlier tokens and themselves, [N, H, 64, 64].

    They are sums over the channels of rows_i k_j e^(G_i - G_j) for j <= i, and 0 elsewhere. rows
    and k are [N, H, 64, dk]; total is [N, H, 64, w].
    """
    if total.shape[-1] == 1:
        upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
        # A product with a transposed view rounds differently from one with a contiguous copy.
        products = rows @ k.transpose(-1, -2).contiguous()
        return products * (total - total.transpose(-1, -2)).masked_fill(upper, float("-inf")).exp()
    products = k.new_zeros(*k.shape[:2], CHUNK, CHUNK)
    for i in range(CHUNK):
        faded = k[..., : i + 1, :] * (total[..., i : i + 1, :] - total[..., : i + 1, :]).exp()
        products[..., i, : i + 1] = (rows[..., i : i + 1, :] * faded).sum(-1)
    return products
