"""The gated delta rule in its two forms, on plain tensors in fp32.

Per token and value head: S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q, with S [dk, dv]
(Yang et al., Gated Delta Networks, 2024). The chunked form gives the same up to rounding, 64 tokens at a time: with
G the running sum of g inside a chunk and D_ij = e^(G_i - G_j) for j <= i, it solves the unit lower triangular system
(I + strict_lower(diag(beta) K K^T * D)) U = diag(beta) (V - e^G (K S)).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.delta_rule import CHUNK


def normalise_heads(q: Tensor, k: Tensor, num_v_heads: int) -> tuple[Tensor, Tensor]:
    """q, k [T, Hk, dk] to fp32 [T, Hv, dk]: unit length per head (eps 1e-6 on the squared sum), q scaled by
    dk^-0.5, each key head serving Hv / Hk consecutive value heads."""
    repeats = num_v_heads // q.shape[1]
    q, k = q.float(), k.float()
    q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    return q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row. q, k [R, H, dk]; v [R, H, dv]; g, beta [R, H]; state [R, H, dk, dv].

    Returns the output [R, H, dv] and the new state. Elementwise products and sums over dk, so that rows cannot
    influence each other's bits.
    """
    state = state * g.exp()[..., None, None]
    error = v - (state * k[..., None]).sum(-2)
    state = state + k[..., None] * (beta[..., None] * error)[..., None, :]
    return (state * q[..., None]).sum(-2), state


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
            chunk_counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Whole prompts or pieces of them, cut on the 64-token grid.

    The chunks of all rows follow one another in the first dimension N, `chunk_counts` per row; a row's last chunk is
    padded with zeros (k, v, g and beta 0 leave the state as it is). q, k [N, H, 64, dk]; v [N, H, 64, dv];
    g, beta [N, H, 64]; state [R, H, dk, dv]. Returns the output [N, H, 64, dv] and the new state [R, H, dk, dv].
    """
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    # Contiguous, because a product of a transposed view rounds differently from one of its copy.
    k_t = k.transpose(-1, -2).contiguous()
    system = (beta[..., None] * (k @ k_t) * decay).tril(-1)
    # Solved for both right-hand sides at once, so that only small products depend on the running state.
    sides = torch.cat([beta[..., None] * v, (beta * total.exp())[..., None] * k], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    u_free, u_state = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    scores = (q @ k_t) * decay
    q_in = total.exp()[..., None] * q
    k_out_t = k_t * (total[..., -1:] - total).exp()[..., None, :]
    chunk_decay = total[..., -1].exp()[..., None, None]

    starts = [sum(chunk_counts[:row]) for row in range(len(chunk_counts))]
    out, state = torch.empty_like(v), state.clone()
    for index in range(max(chunk_counts, default=0)):
        rows = [row for row, count in enumerate(chunk_counts) if count > index]
        at = torch.tensor([starts[row] + index for row in rows])
        before = state[rows]
        u = u_free[at] - u_state[at] @ before
        out[at] = q_in[at] @ before + scores[at] @ u
        state[rows] = chunk_decay[at] * before + k_out_t[at] @ u
    return out, state
