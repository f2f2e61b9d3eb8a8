"""A paged cache with requests in it, and dense attention in fp64 as the oracle of every backend."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.contracts.attention import AttentionBackend, AttentionGeometry
from engine.core.batch import ForwardMode
from engine.core.draft_trees import SpecInfo, SpecRow
from tests.support.kernels.batches import Row, make_batch

LAYER = 3


@dataclass
class Prompt:
    """One request's projected tokens, ready to be fed in any cut. q [n, heads, D]; k, v [n, kv
    heads, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    pages: tuple[int, ...]
    fed: int = 0
    out: list[Tensor] = field(default_factory=list)

    def output(self) -> Tensor:
        return torch.cat(self.out)


def make_prompt(
    num_tokens: int,
    geometry: AttentionGeometry,
    *,
    pages: Sequence[int],
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Prompt:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(num_tokens, heads, geometry.head_dim, generator=generator).to(dtype)

    return Prompt(
        draw(geometry.num_heads),
        draw(geometry.num_kv_heads),
        draw(geometry.num_kv_heads),
        tuple(pages),
    )


def feed(
    backend: AttentionBackend,
    mode: ForwardMode,
    *parts: tuple[Prompt, int],
    table_width: int = 0,
    trees: Sequence[tuple[int, ...]] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run one forward with the next tokens of each prompt, as many as stated; `trees`: their
    parents. Outputs are also kept on the prompts."""
    rows = [Row(count, prompt.fed, prompt.pages) for prompt, count in parts]
    spec_info = None if trees is None else tree_info(*trees)
    batch = make_batch(mode, rows, table_width=table_width, spec_info=spec_info)
    backend.plan(batch)
    q, k, v = (
        torch.cat(
            [getattr(prompt, name)[prompt.fed : prompt.fed + count] for prompt, count in parts]
        )
        for name in ("q", "k", "v")
    )
    out = backend.run(LAYER, q, k, v, batch, sinks=sinks)
    for (prompt, count), piece in zip(
        parts, torch.split(out, [count for _, count in parts]), strict=True
    ):
        prompt.fed += count
        prompt.out.append(piece)
    return out


def tree_info(*trees: tuple[int, ...]) -> SpecInfo:
    """Build a batch's trees from the parents of each row's nodes."""
    return SpecInfo(
        torch.zeros(sum(map(len, trees)), dtype=torch.long),
        tuple(SpecRow(parents) for parents in trees),
    )


def dense(
    prompt: Prompt,
    geometry: AttentionGeometry,
    *,
    visible: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the same in fp64 over all tokens at once; causal unless `visible` [n, n] is given.

    A sink is one more key with the score `sinks` [heads] and the value 0."""
    share = geometry.num_heads // geometry.num_kv_heads
    q, k, v = (x.double().transpose(0, 1) for x in (prompt.q, prompt.k, prompt.v))
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = q @ k.transpose(1, 2) * geometry.scale
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if visible is None else visible
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        own = (sinks.double() * geometry.scale)[:, None, None].expand(*scores.shape[:2], 1)
        scores, v = torch.cat([own, scores], -1), torch.cat([torch.zeros_like(v[:, :1]), v], 1)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def poisoned_pool(
    num_pages: int, geometry: AttentionGeometry, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Create a KV tensor in which every unwritten byte is NaN."""
    shape = (num_pages, 2, geometry.num_kv_heads, geometry.page_size, geometry.head_dim)
    return torch.full(shape, float("nan"), dtype=dtype)
