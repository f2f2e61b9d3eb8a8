"""The stage skeleton that all families share.

It has the embedding on the first stage, a range of layers, and the norm and head on the last stage.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from engine.contracts.model import (
    ExpertTokens,
    ForwardContext,
    ModelFacts,
    RanksOfStage,
    StageOutput,
)
from engine.core.batch import ForwardBatch
from engine.core.layer_range import LayerRange
from engine.sampling.sampler import wanted_tokens
from models.blocks.every_rank import EveryRank
from models.blocks.linear import embed, owners_of
from models.blocks.norm import RmsNorm
from models.blocks.rotary import Rotary
from models.blocks.spec import DecoderSpec, LayerSpec, StagePass
from models.blocks.weights import Weights
from runtime.errors import InternalError

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
HEAD = "lm_head.weight"


class DecoderLayer:
    """A mixer and a feed-forward, each with norms before or around it and with a residual.

    The first layer of a stage also computes the values that the whole stage needs once per forward.
    """

    def __init__(
        self,
        *,
        spec: LayerSpec,
        decoder: DecoderSpec,
        layer_id: int,
        start_layer: int,
        rotary: Rotary | None,
        weights: Weights,
        window_rotary: Rotary | None = None,
        ranks: RanksOfStage | None = None,
    ) -> None:
        self.layer_id = layer_id
        self.start_layer = start_layer
        self._ranks = ranks
        self._rotary = rotary
        self._window_rotary = window_rotary
        self._input_norm = decoder.norm.build(weights, "input_layernorm", decoder.hidden_size)
        self._mixer = spec.mixer.build(
            weights.at(spec.mixer.weights_name).among(None if ranks is None else ranks.attention),
            layer_id=layer_id,
        )
        self._mixed_norm: RmsNorm | None = None
        self._output_norm: RmsNorm | None = None
        before = "post_attention_layernorm"
        if decoder.norms_outputs:
            self._mixed_norm = decoder.norm.build(
                weights, "post_attention_layernorm", decoder.hidden_size
            )
            self._output_norm = decoder.norm.build(
                weights, "post_feedforward_layernorm", decoder.hidden_size
            )
            before = "pre_feedforward_layernorm"
        self._post_norm = decoder.norm.build(weights, before, decoder.hidden_size)
        self.feed_forward = spec.feed_forward.build(weights.at("mlp").among(ranks))
        self._scale = weights.tensor("layer_scalar", 1) if decoder.scales_layers else None
        self._adapter_rows = weights.adapters.rows

    def forward(
        self,
        hidden: Tensor,
        stage_pass: StagePass,
        wanted: Tensor | slice | None = None,
        every: EveryRank | None = None,
    ) -> Tensor:
        """Return the layer's output for `hidden` [T, hidden], with the same shape.

        `wanted` selects tokens: the output then has only their rows, and the feed-forward runs for
        no other token. `every` are those tokens of all data ranks, if there are several. All data
        ranks share the feed-forward, so it runs also on a rank without tokens.
        """
        mixed = None
        if len(hidden):
            hidden, mixed = self._mixed(hidden, stage_pass, wanted)
        if not (len(hidden) if every is None else sum(every.counts)):
            return hidden
        if mixed is None:
            rows = self._post_norm.forward(hidden)
        else:
            hidden, rows = self._post_norm.add_and_forward(hidden, mixed)
        fed = self._fed(rows, every)
        hidden = hidden + (fed if self._output_norm is None else self._output_norm.forward(fed))
        return hidden if self._scale is None else hidden * self._scale

    def _fed(self, rows: Tensor, every: EveryRank | None) -> Tensor:
        if every is None or self._ranks is None:
            return self.feed_forward.forward(rows)
        gathered = self._ranks.gather_rows(rows, every.counts)
        with self._adapter_rows.having(every.adapters):
            fed = self.feed_forward.forward(gathered)
        return self._ranks.own_rows(fed, every.counts)

    def _mixed(
        self, hidden: Tensor, stage_pass: StagePass, wanted: Tensor | slice | None
    ) -> tuple[Tensor, Tensor]:
        """Return the wanted rows, and the mixer's output to add to them."""
        if self.layer_id == self.start_layer:
            if self._rotary is not None:
                stage_pass.rotary = self._rotary.table(stage_pass.batch.positions)
            if self._window_rotary is not None:
                stage_pass.window_rotary = self._window_rotary.table(stage_pass.batch.positions)
        mixed = self._mixer.forward(self._input_norm.forward(hidden), stage_pass)
        if stage_pass.context.on_layer_done is not None:
            stage_pass.context.on_layer_done(self.layer_id)
        if wanted is not None:
            hidden = hidden[wanted]
            mixed = mixed[wanted]
            if stage_pass.batch.adapters:
                self._adapter_rows.keep(wanted)
        return hidden, mixed if self._mixed_norm is None else self._mixed_norm.forward(mixed)


_Embedding = Callable[[Tensor], Tensor]  # from token ids [T] to rows [T, hidden]


class DecoderStage:
    """A `StageModel` with the layers of `layer_range`, built from `weights`.

    `capture_layers` are global ids of layers whose output drafts need. A stage adds its own ones to
    `aux_hidden` and forwards the others.
    """

    def __init__(
        self,
        *,
        facts: ModelFacts,
        spec: DecoderSpec,
        layer_range: LayerRange,
        weights: Weights,
        capture_layers: frozenset[int] = frozenset(),
        ranks: RanksOfStage | None = None,
    ) -> None:
        """Build the stage. `ranks` are the ranks that share it, if there are several."""
        self._facts = facts
        self._layer_range = layer_range
        self._device = weights.device
        self._capture_layers = capture_layers
        self._is_first = layer_range.start == 0
        self._is_last = layer_range.end == spec.num_layers
        self._takes_selection = spec.layers[layer_range.start].mixer.shares_selection
        self._hands_on_selection = (
            not self._is_last and spec.layers[layer_range.end].mixer.shares_selection
        )
        self._vocabularies = spec.vocabularies
        self._own_vocabulary = spec.vocabulary
        self._ranks = ranks
        self._has_data_ranks = spec.rank.data_size > 1
        self.adapters = weights.adapters
        self._embed: _Embedding | None = None
        if self._is_last:
            name = (EMBEDDING if spec.tied_head else HEAD).removesuffix(".weight")
            head, width = weights.for_head(), spec.hidden_size
            self._head = head.linear(name, rows=(spec.vocabulary,), in_features=width)
        if self._is_first:
            self._embed = self._embedding(spec, weights)
        self._embedding_scale = torch.tensor(
            spec.embedding_scale, dtype=getattr(torch, facts.dtype)
        ).item()
        self._logit_bound = spec.logit_bound
        rotary, window_rotary = (
            Rotary.of(rope, dtype=getattr(torch, facts.dtype), device=weights.device)
            for rope in (spec.rope, spec.window_rope)
        )
        self.layers = [
            DecoderLayer(
                spec=spec.layers[layer_id],
                decoder=spec,
                layer_id=layer_id,
                start_layer=layer_range.start,
                rotary=rotary,
                ranks=ranks,
                weights=weights.at(f"layers.{layer_id}"),
                window_rotary=window_rotary,
            )
            for layer_id in layer_range
        ]
        if self._is_last:
            self._norm = spec.norm.build(weights, "norm", spec.hidden_size)

    def _embedding(self, spec: DecoderSpec, weights: Weights) -> _Embedding:
        """Return the embedding: a tied head in the model's dtype, or a table."""
        if self._is_last and spec.tied_head and not weights.weight_format.is_coded:
            return self._head.weight_rows
        vocabulary = spec.vocabulary
        own = weights.tensor(EMBEDDING, len(vocabulary), spec.hidden_size, rows=vocabulary)
        return partial(embed, table=own)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def layer_range(self) -> LayerRange:
        return self._layer_range

    @property
    def expert_tokens(self) -> dict[int, ExpertTokens]:
        """Implement `StageModel.expert_tokens`."""
        found = {layer.layer_id: layer.feed_forward.expert_tokens for layer in self.layers}
        return {layer_id: tokens for layer_id, tokens in found.items() if tokens is not None}

    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None,
        context: ForwardContext,
        aux_hidden: Mapping[int, Tensor] | None = None,
        selected_keys: Tensor | None = None,
    ) -> StageOutput:
        """Run this stage's layers, as `StageModel.forward` describes.

        A batch without tokens passes unchanged, except for the work that other data ranks need. The
        output of the previous stage must be on this stage's device.

        Raises:
            InternalError: the first stage got no token ids, a later one got no hidden states, or a
                stage whose first layer shares a selection got no selected keys.
        """
        if not batch.adapters:
            return self._forward(batch, hidden, context, aux_hidden, selected_keys)
        rows = self.adapters.rows
        with rows.having(rows.of_batch(batch)):
            return self._forward(batch, hidden, context, aux_hidden, selected_keys)

    def _forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None,
        context: ForwardContext,
        aux_hidden: Mapping[int, Tensor] | None,
        selected_keys: Tensor | None,
    ) -> StageOutput:
        hidden = self._stage_input(batch, hidden)
        captured = dict(aux_hidden or {})
        stage_pass = StagePass(
            batch=batch, context=context, selected_keys=self._stage_selection(batch, selected_keys)
        )
        wanted = self._wanted(batch) if self._is_last else None
        cut_layer = self._cut_layer(wanted)
        tokens, logits = self._every_rank(batch)
        for layer in self.layers:
            if batch.num_tokens or self._has_data_ranks:
                hidden = layer.forward(
                    hidden,
                    stage_pass,
                    wanted if layer.layer_id == cut_layer else None,
                    logits if self._may_cut(layer.layer_id) else tokens,
                )
            if layer.layer_id in self._capture_layers:
                captured[layer.layer_id] = hidden
        if not self._is_last:
            handed_on = stage_pass.selected_keys if self._hands_on_selection else None
            return StageOutput(hidden=hidden, aux_hidden=captured, selected_keys=handed_on)
        if cut_layer is None and batch.adapters:
            self.adapters.rows.keep(wanted)
        rows = hidden if wanted is None or cut_layer is not None else hidden[wanted]
        return StageOutput(
            logits=self._logits(self._norm.forward(rows), logits), aux_hidden=captured
        )

    def _logits(self, rows: Tensor, every: EveryRank | None) -> Tensor | None:
        """Return the logits [n, vocab] of rows [n, hidden] on sampling ranks, else None."""
        if self._ranks is None:
            return self._bounded(self._head.logits(rows))
        widths = [len(share) for share in self._vocabularies]
        if every is None:
            return self._ranks.collect(self._bounded(self._head.logits(rows)), [len(rows)], widths)
        gathered = self._ranks.gather_rows(rows, every.counts)
        with self.adapters.rows.having(every.adapters):
            logits = self._bounded(self._head.logits(gathered))
        return self._ranks.collect(logits, every.counts, widths)

    def _bounded(self, logits: Tensor) -> Tensor:
        bound = self._logit_bound
        return logits if bound is None else logits.div_(bound).tanh_().mul_(bound)

    def _every_rank(self, batch: ForwardBatch) -> tuple[EveryRank | None, EveryRank | None]:
        """Return the tokens of all data ranks, and those with logits; None if there is one rank."""
        if not self._has_data_ranks:
            return None, None
        shares, rows = batch.shares, self.adapters.rows
        return EveryRank.of_tokens(shares, rows), EveryRank.of_logits(shares, rows)

    def _embedded(self, token_ids: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings of token_ids [T], [T, hidden].

        The row of a token comes from the rank that owns it.
        """
        if self._ranks is None:
            return embed(token_ids)
        part = self._own_vocabulary
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < part.total:
            raise IndexError(
                f"index out of range: a token id is not within vocab_size {part.total}"
            )
        rows = self._ranks.gather(embed((token_ids - part.start).clamp(0, len(part) - 1)))
        return rows[
            owners_of(token_ids, self._vocabularies) * len(token_ids) + torch.arange(len(token_ids))
        ]

    def _wanted(self, batch: ForwardBatch) -> Tensor | slice | None:
        """Return the indices of the tokens whose logits the last stage computes.

        They are a slice if they are adjacent. None means all tokens, as in decode steps.
        """
        wanted = wanted_tokens(batch)
        if len(wanted) == batch.num_tokens:
            return None
        if not wanted or wanted[-1] - wanted[0] == len(wanted) - 1:
            return slice(wanted[0], wanted[-1] + 1) if wanted else slice(0, 0)
        return torch.tensor(wanted, dtype=torch.long).to(self._device)

    def _cut_layer(self, wanted: Tensor | slice | None) -> int | None:
        """Return the last layer if only sampling tokens need the work after its mixer.

        Most tokens of a prompt do not need it.
        """
        last = self._layer_range.end - 1
        return last if wanted is not None and self._may_cut(last) else None

    def _may_cut(self, layer_id: int) -> bool:
        return (
            self._is_last
            and layer_id == self._layer_range.end - 1
            and layer_id not in self._capture_layers
        )

    def _stage_selection(self, batch: ForwardBatch, selected_keys: Tensor | None) -> Tensor | None:
        """Return the keys for a first layer that shares a selection, one row per token, or None."""
        if not self._takes_selection or not batch.num_tokens:
            return None
        if selected_keys is None or selected_keys.shape[0] != batch.num_tokens:
            raise InternalError(
                f"stage {self._layer_range} needs the keys selected for {batch.num_tokens} tokens: its "
                f"layer {self._layer_range.start} shares the selection of an earlier layer"
            )
        return selected_keys

    def _stage_input(self, batch: ForwardBatch, hidden: Tensor | None) -> Tensor:
        if self._embed is None:
            if hidden is None and not batch.num_tokens:
                return torch.empty(
                    0, self._facts.hidden_size, dtype=getattr(torch, self._facts.dtype)
                )
            if hidden is None or hidden.shape[0] != batch.num_tokens:
                raise InternalError(
                    f"stage {self._layer_range} needs hidden states of {batch.num_tokens} tokens"
                )
            return hidden
        if batch.token_ids is None:
            raise InternalError(f"stage {self._layer_range} needs token ids")
        if not self._has_data_ranks or self._ranks is None:
            embedded = self._embedded(batch.token_ids, self._embed)
        else:
            counts = [share.tokens for share in batch.shares]
            every = self._ranks.gather_rows(batch.token_ids.int(), counts).long()
            embedded = self._ranks.own_rows(self._embedded(every, self._embed), counts)
        return embedded if self._embedding_scale == 1 else embedded * self._embedding_scale
