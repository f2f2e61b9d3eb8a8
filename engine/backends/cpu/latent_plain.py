"""MLA and DSA on the CPU in plain torch, for dtypes without compiled kernels.

Each token gathers its own keys in position order into blocks of a fixed size. Products have a fixed
inner shape, and blocks are added in order. So a token's bits depend on its own keys only, within
the guarantees of the library's products. The cost of a selection is proportional to its size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.plan import tree_visibility
from engine.backends.selection import best_positions, true_positions
from engine.contracts.latent import LatentGeometry
from engine.core.batch import ForwardBatch

_BLOCK = 64  # keys per product
_TILE_ELEMENTS = 1 << 24  # bounds the memory of one step, which processes a few tokens at a time


@dataclass(frozen=True)
class PlainLatents:
    """The keys of a batch's tokens.

    R is the number of rows, T of tokens, K of keys of the longest row, in whole blocks.

    Attributes:
        token_rows: [T] int64.
        own_slots: [T] int64, the destination of each token's entry: page * page_size + offset.
        key_slots: [R, K] int64, the slots of the row's keys.
        hidden: [T, K] bool, True if the token must not see the key.
    """

    num_rows: int
    token_rows: Tensor
    own_slots: Tensor
    key_slots: Tensor
    hidden: Tensor

    def select(self, keys: Tensor, q: Tensor, weights: Tensor, width: int) -> Tensor:
        """Select the `width` best of a layer's index keys [slots, dim] for each token.

        The rule is that of `LatentAttentionBackend.select`.
        """
        num_heads, head_dim = q.shape[1:]
        chosen = [torch.empty(0, width, dtype=torch.int32)]
        for row, tokens in self._row_tiles(elements_per_token=num_heads * self.key_slots.shape[1]):
            blocks = keys[self.key_slots[row]].view(-1, _BLOCK, head_dim)
            scores = _index_scores(q[tokens].float(), blocks.float(), weights[tokens])
            hidden = self.hidden[tokens]
            chosen.append(best_positions(scores.masked_fill(hidden, float("-inf")), hidden, width))
        return torch.cat(chosen)

    def attend(
        self, cached: Tensor, q: Tensor, selected: Tensor | None, geometry: LatentGeometry
    ) -> Tensor:
        """Attend to a layer's entries [slots, entry] with q [T, heads, entry].

        The result is [T, heads, latent].
        """
        if selected is None:
            selected = true_positions(~self.hidden, self.hidden.shape[1])
        selected = F.pad(selected, (0, -selected.shape[1] % _BLOCK), value=-1).long()
        hidden = selected < 0
        # Padding reads the token's own entry, which is always written, and is masked.
        slots = self.key_slots[self.token_rows[:, None], selected.clamp(min=0)]
        slots = torch.where(hidden, self.own_slots[:, None], slots)
        out = q.new_empty(*q.shape[:2], geometry.latent_dim)
        step = max(1, _TILE_ELEMENTS // max(1, slots.shape[1] * geometry.entry_dim))
        for start in range(0, len(q), step):
            tokens = slice(start, start + step)
            out[tokens] = _attend(q[tokens], cached[slots[tokens]], hidden[tokens], geometry)
        return out

    def _row_tiles(self, *, elements_per_token: int) -> Iterator[tuple[int, slice]]:
        """Yield runs of tokens of one row, short enough to bound memory."""
        step = max(1, _TILE_ELEMENTS // max(1, elements_per_token))
        start = 0
        for row, count in enumerate(
            torch.bincount(self.token_rows, minlength=self.num_rows).tolist()
        ):
            for first in range(start, start + count, step):
                yield row, slice(first, min(first + step, start + count))
            start += count


def plan_plainly(
    batch: ForwardBatch,
    geometry: LatentGeometry,
    token_rows: Tensor,
    positions: Tensor,
    own_slots: Tensor,
) -> PlainLatents:
    """Plan a batch; `positions` are the storage positions of the tokens' entries."""
    lengths = [
        context + query for context, query in zip(batch.context_lens, batch.query_lens, strict=True)
    ]
    key_ids = torch.arange(-(-max(lengths, default=0) // _BLOCK) * _BLOCK)
    tables = batch.page_tables.long()
    missing = -(-len(key_ids) // geometry.page_size) - tables.shape[1]
    tables = F.pad(tables, (0, max(0, missing)))
    slots = (
        tables[:, key_ids // geometry.page_size] * geometry.page_size + key_ids % geometry.page_size
    )
    hidden = key_ids[None, :] > positions[:, None]
    start = 0
    for visible, length in zip(tree_visibility(batch), lengths, strict=False):
        num_tokens, width = visible.shape
        hidden[start : start + num_tokens] = key_ids >= length
        hidden[start : start + num_tokens, length - width : length] = ~visible
        start += num_tokens
    return PlainLatents(
        num_rows=batch.num_rows,
        token_rows=token_rows,
        own_slots=own_slots,
        key_slots=slots,
        hidden=hidden,
    )


def _attend(q: Tensor, keys: Tensor, hidden: Tensor, geometry: LatentGeometry) -> Tensor:
    """Attend with q [M, heads, entry] to keys [M, K, entry].

    hidden is [M, K]. The result is [M, heads, latent].
    """
    num_tokens, num_heads = q.shape[:2]
    rows = padded_rows(num_heads, q.dtype)
    blocks = keys.view(num_tokens, -1, _BLOCK, geometry.entry_dim)
    queries = (
        F.pad(q, (0, 0, 0, rows - num_heads))[:, None]
        .expand(-1, blocks.shape[1], -1, -1)
        .flatten(0, 1)
    )
    blocks = blocks.flatten(0, 1)  # [M * blocks, 64, entry]
    scores = torch.bmm(queries, blocks.transpose(1, 2)).float() * geometry.scale
    scores.masked_fill_(hidden.view(-1, 1, _BLOCK), float("-inf"))
    scores = scores.view(num_tokens, -1, rows, _BLOCK)
    weights = torch.exp(scores - scores.amax((1, 3), keepdim=True))
    parts = torch.bmm(weights.to(q.dtype).flatten(0, 1), blocks[..., : geometry.latent_dim])
    total = _sum_in_order(parts.float().view(num_tokens, -1, rows, geometry.latent_dim))
    total = total / _sum_in_order(weights.sum(-1))[..., None]
    return total[:, :num_heads].to(q.dtype)


def _index_scores(q: Tensor, blocks: Tensor, weights: Tensor) -> Tensor:
    """Return the index scores [M, B * 64].

    q is [M, heads, dim]; blocks is [B, 64, dim]; weights is [M, heads]; all are fp32.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_rows = num_tokens * num_heads
    rows = F.pad(q.flatten(0, 1), (0, 0, 0, padded_rows(num_rows, q.dtype) - num_rows))
    products = torch.bmm(rows.expand(len(blocks), -1, -1), blocks.transpose(1, 2))[:, :num_rows]
    products = F.relu(products * head_dim**-0.5).view(-1, num_tokens, num_heads, _BLOCK)
    weighted = products * weights[:, :, None]
    return _sum_in_order(weighted.transpose(1, 2)).transpose(0, 1).flatten(1)


def _sum_in_order(x: Tensor) -> Tensor:
    """Sum over axis 1, first to last.

    Library sums choose their own order by shape.
    """
    total = x[:, 0].clone()
    for index in range(1, x.shape[1]):
        total += x[:, index]
    return total


def padded_rows(num_rows: int, dtype: torch.dtype) -> int:
    """Return the row count of a CPU matrix product whose bits do not depend on the number of rows.

    Measured with MKL and oneDNN on x86, 1 to 8 threads. fp32 products of fewer than 4 rows take
    another path. With several threads, so do products of fewer than 12 rows that are not a multiple
    of 4. A single bf16 row may be summed in parallel pieces. The tests check this on the machine
    they run on.
    """
    if dtype is torch.bfloat16:
        return 4 if num_rows == 1 else num_rows
    return num_rows if num_rows >= 12 else -(-num_rows // 4) * 4
