"""The simplest thing that runs a model: plain tensors as pools, fixed pages per sequence, stages
called in turn.

Pools start as NaN, so that a read of anything unwritten shows. Sequences own shuffled pages, so
that page order matters.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.backends.cpu.latent import CpuLatentAttention
from engine.backends.cpu.recurrent import CpuRecurrent
from engine.contracts.model import ForwardContext, StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from engine.core.request import SamplingParams
from engine.memory.layout import CacheKind
from models.decoder import DecoderStage
from models.loader import ModelDescription
from testing.batches import unmarked


class StageDriver:
    """A model cut before each layer of `cuts`, and its sequences 0, 1, ... up to
    `num_sequences`."""

    def __init__(
        self,
        model: ModelDescription,
        *,
        cuts: Sequence[int] = (),
        page_size: int = 16,
        num_sequences: int = 4,
        max_tokens: int = 256,
        numerics: Numerics = Numerics.EXACT,
        capture_layers: frozenset[int] = frozenset(),
    ) -> None:
        bounds = [0, *cuts, model.facts.num_layers]
        self.stages = [
            model.load_stage(LayerRange(a, b), numerics=numerics, capture_layers=capture_layers)
            for a, b in pairwise(bounds)
        ]
        self.numerics = numerics
        self._page_size = page_size
        self._lengths = [0] * num_sequences
        pages_each = -(-max_tokens // page_size)
        shuffled = (
            torch.randperm(num_sequences * pages_each, generator=torch.Generator().manual_seed(1))
            + 1
        )
        self._tables = shuffled.view(num_sequences, pages_each).int()
        self.pools = _pools(
            model,
            page_size=page_size,
            num_pages=num_sequences * pages_each + 1,
            num_slots=num_sequences + 1,
        )
        self._keys = {adapter.name: adapter.key for adapter in model.adapters}
        self.adapters: dict[int, str] = {}  # names of sequences that have one
        self.layers_done: list[int] = []
        self.contexts = [self._context(model, stage, page_size) for stage in self.stages]

    def _key(self, row: int) -> str:
        name = self.adapters.get(row, "")
        return self._keys.get(name, name)

    def prefill(self, rows: dict[int, list[int]], *, samples: bool = True) -> Tensor:
        """Append each sequence's tokens as one chunk; returns logits [rows, vocab] of the last
        ones."""
        return self._logits(self.run(self.batch(ForwardMode.PREFILL, rows, samples=samples)))

    def decode(self, rows: dict[int, int]) -> Tensor:
        """Append one token to each sequence; returns logits [rows, vocab]."""
        batch = self.batch(
            ForwardMode.DECODE, {row: [token] for row, token in rows.items()}, samples=True
        )
        return self._logits(self.run(batch))

    def batch(
        self, mode: ForwardMode, rows: dict[int, list[int]], *, samples: bool
    ) -> ForwardBatch:
        contexts = [self._lengths[row] for row in rows]
        positions = [
            p
            for start, tokens in zip(contexts, rows.values(), strict=True)
            for p in range(start, start + len(tokens))
        ]
        index = torch.tensor(list(rows), dtype=torch.long)
        drawn = SamplingRow(params=SamplingParams(), position=0) if samples else None
        return ForwardBatch(
            mode=mode,
            request_keys=tuple(rows),
            query_lens=tuple(len(tokens) for tokens in rows.values()),
            context_lens=tuple(contexts),
            token_ids=torch.tensor(
                [token for tokens in rows.values() for token in tokens], dtype=torch.long
            ),
            positions=torch.tensor(positions, dtype=torch.long),
            page_tables=self._tables[index],
            slot_ids=(index + 1).int(),
            sampling=(drawn,) * len(rows),
            adapters=tuple(map(self._key, rows)) if self.adapters else (),
        )

    def forget(self, row: int) -> None:
        """End the sequence; its pages and slot keep their contents for the next one."""
        self._lengths[row] = 0

    def fill_what_nobody_owns(self, value: float) -> None:
        """Overwrite the null records, those of sequences without tokens, and pages after a
        sequence's last token."""
        page_size = self._page_size
        for (_, kind), pool in self.pools.items():
            for index in range(pool.shape[0]):
                if not kind.is_paged:
                    owned = index > 0 and self._lengths[index - 1] > 0
                    pool[index] = pool[index] if owned else value
                    continue
                place = (self._tables == index).nonzero().tolist()
                written = self._lengths[place[0][0]] - page_size * place[0][1] if place else 0
                kept = min(max(written, 0), page_size)
                dim = (
                    2 if kind is CacheKind.KV else 0
                )  # K/V pages are [2, heads, page_size, head_dim]
                pool[index].narrow(dim, kept, page_size - kept).fill_(value)

    def run(self, batch: ForwardBatch) -> StageOutput:
        """Run one batch through all stages."""
        output = StageOutput()
        for index, (stage, context) in enumerate(zip(self.stages, self.contexts, strict=True)):
            local = unmarked(batch)
            if index:
                local.token_ids = None
            self.plan(index, local)
            output = stage.forward(
                local, output.hidden, context, output.aux_hidden, output.selected_keys
            )
        for row, length in zip(batch.request_keys, batch.query_lens, strict=True):
            self._lengths[row] += length
        return output

    def plan(self, stage_index: int, batch: ForwardBatch) -> None:
        context = self.contexts[stage_index]
        planner = context.attention or context.latent_attention
        assert planner is not None
        planner.plan(batch)

    def _context(
        self, model: ModelDescription, stage: DecoderStage, page_size: int
    ) -> ForwardContext:
        paged, latent = model.attention_geometry(page_size), model.latent_geometry(page_size)
        return ForwardContext(
            attention=None
            if paged is None
            else CpuAttention(
                kv_pools=self._local(CacheKind.KV, stage),
                window_pools=self._local(CacheKind.WINDOW, stage),
                geometry=paged,
            ),
            latent_attention=None
            if latent is None
            else CpuLatentAttention(
                latent_pools=self._local(CacheKind.LATENT, stage),
                index_pools=self._local(CacheKind.INDEX_KEY, stage),
                geometry=latent,
            ),
            recurrent=CpuRecurrent(
                conv_pools=self._local(CacheKind.CONV, stage),
                state_pools=self._local(CacheKind.STATE, stage),
                numerics=self.numerics,
            ),
            on_layer_done=self.layers_done.append,
        )

    def _local(self, kind: CacheKind, stage: DecoderStage) -> dict[int, Tensor]:
        return {
            layer_id: pool
            for (layer_id, of_kind), pool in self.pools.items()
            if of_kind is kind and layer_id in stage.layer_range
        }

    @staticmethod
    def _logits(output: StageOutput) -> Tensor:
        assert output.logits is not None
        return output.logits


def _pools(
    model: ModelDescription, *, page_size: int, num_pages: int, num_slots: int
) -> dict[tuple[int, CacheKind], Tensor]:
    return {
        (spec.layer_id, spec.kind): torch.full(
            (num_pages if spec.kind.is_paged else num_slots, *spec.record_shape),
            float("nan"),
            dtype=getattr(torch, spec.dtype),
        )
        for spec in model.cache_specs(page_size)
    }
