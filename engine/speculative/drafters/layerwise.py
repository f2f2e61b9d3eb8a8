"""Drafting with one layer per step: several NextN layers.

The scheme is described in DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2. At slot t,
layer k reads the output of layer k - 1 for that slot (layer 0: the target's features) together with
token t + k + 1, and predicts token t + k + 2. Each layer has its own cache over the same pages.
When the draft follows the target, the layers run over the new slots one after another. The token
that one layer proposes after a row's last slot is the next layer's input there. So the chain is
complete without a round of steps, and one plan serves all layers.

After the accepted tokens, a layer reads tokens that earlier layers proposed. If such a token is
rejected, the entry made with it is not computed again: in layer k, up to k entries after a
rejection. This lowers the acceptance rate but never changes the output.

Legend: R rows, D layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, plan_where_needed
from engine.core.draft_trees import NO_TREE, CarriedKeys, SpecInfo, TokenTree
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.trees.draft_batches import extend_batch, followed_rows, row_ends
from engine.speculative.trees.draft_handoff import HandedChains
from engine.speculative.trees.proposal import Candidates
from runtime.errors import InternalError


class LayerwiseDrafter:
    """A `Drafter` of chains of up to D tokens.

    `handed` holds the chains that are transferred with prompts, if the pool transfers draft state.
    """

    def __init__(
        self,
        *,
        layers: Sequence[DraftModel],
        attention: DraftAttention,
        handed: HandedChains | None = None,
    ) -> None:
        """Create a drafter.

        `layers` are in step order, each with its own cache under `attention`.
        """
        self._layers = layers
        self._attention = attention
        self._handed = handed
        self.num_plans = {"draft_extend": 0, "draft_round": 0}  # by path

    @torch.inference_mode()
    def follow(self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]) -> None:
        """Implement `PoolDrafter.follow`."""
        if followed := followed_rows(batch, runs):
            extend = extend_batch(batch, followed, self._attention.page_size)
            log_p, tokens = self._extend(
                extend, [token for row in followed for token in row.features], output
            )
            ended = [index for index, row in enumerate(followed) if row.num_nodes]
            if self._handed is not None and ended:
                self._handed.put(extend.slot_ids[ended].long(), log_p[ended], tokens[ended])

    @torch.inference_mode()
    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        """Implement `Drafter.begin`. The whole chain was handed over."""
        info = batch.spec_info
        if self._handed is None or not isinstance(info, SpecInfo):
            raise InternalError("no draft state is handed over to this pool")
        return _chains(
            *self._handed.get(batch.slot_ids.long()),
            [row.num_draft_tokens or 0 for row in info.rows],
        )

    @torch.inference_mode()
    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        """Implement `Drafter.propose`."""
        followed = followed_rows(batch, runs)
        if not followed:
            return [NO_TREE] * len(runs)
        extend = extend_batch(batch, followed, self._attention.page_size)
        log_p, tokens = self._extend(
            extend, [token for row in followed for token in row.features], output
        )
        grown = _chains(log_p, tokens, [row.num_nodes for row in followed])
        trees = {row.row: tree for row, tree in zip(followed, grown, strict=True)}
        return [trees.get(run.row, NO_TREE) for run in runs]

    def _extend(
        self, extend: ForwardBatch, tokens: Sequence[int], output: StageOutput
    ) -> tuple[Tensor, Tensor]:
        """Run all layers over the batch's slots, which read the features of `tokens`.

        Return log probabilities and tokens of the rows' chains, [R, D] each.
        """
        device = next(iter(output.aux_hidden.values())).device
        hidden = self._layers[0].features(output.aux_hidden, torch.tensor(tokens).to(device))
        self.num_plans["draft_extend"] += plan_where_needed(extend, self._attention.pages)
        last = row_ends(extend)
        found = []
        for layer in self._layers:
            extend.spec_info = CarriedKeys()  # every layer chooses its own keys
            hidden = layer.forward(extend, hidden, self._attention.on_pages)
            log_p, ids = layer.logits(hidden[last.to(device)]).log_softmax(-1).max(-1)
            proposed = layer.target_ids(ids)
            found.append((log_p, proposed))
            assert extend.token_ids is not None, "a draft reads tokens"
            extend.token_ids = extend.token_ids.roll(-1)
            extend.token_ids[last] = proposed.to(extend.token_ids.device)
        return torch.stack([log_p for log_p, _ in found], 1), torch.stack(
            [ids for _, ids in found], 1
        )


def _chains(log_p: Tensor, tokens: Tensor, num_nodes: Sequence[int]) -> list[TokenTree]:
    """Return the first `num_nodes[r]` tokens of each row's chain."""
    parents = torch.arange(-1, tokens.shape[1] - 1).expand_as(tokens)
    return Candidates(log_p.clamp(max=0.0).cumsum(1), tokens, parents).trees(num_nodes)
