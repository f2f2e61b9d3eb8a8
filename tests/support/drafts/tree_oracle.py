"""Draft trees by hand: grown slot by slot without pages, plans or batches, and held against those
of a drafter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo, TokenTree
from engine.speculative.contracts.drafter import Drafter
from engine.speculative.contracts.verify import AcceptedRun
from tests.support.drafts.drafters import Shape

Kept = tuple[Tensor, ...]  # what a slot keeps for later ones
Cached = list[Kept]  # of one slot after the other
Slot = tuple[int, Tensor, int]  # position, feature, next token


class TreeOracle:
    """A draft by its formulas; `layers` are the target's whose outputs, side by side, are a slot's
    feature."""

    layers: tuple[int, ...]

    def first_hidden(self, feature: Tensor) -> Tensor:
        """Return the input of a slot in place of an earlier step's hidden state."""
        raise NotImplementedError

    def step(
        self, token: int, hidden: Tensor, position: int, cached: Cached
    ) -> tuple[Tensor, Cached]:
        """Run one slot after those in `cached`; return its hidden state and the longer cache."""
        raise NotImplementedError

    def log_p(self, hidden: Tensor) -> Tensor:
        """Return log probabilities [vocab] of the token after the next."""
        raise NotImplementedError

    def tree(
        self, features: Sequence[Tensor], tokens: Sequence[int], start: int, shape: Shape
    ) -> TokenTree:
        """Grow the tree after slots of these features and next tokens, at positions from `start`
        on."""
        cached: Cached = []
        hidden = torch.empty(0)
        for offset, (feature, token) in enumerate(zip(features, tokens, strict=True)):
            hidden, cached = self.step(token, self.first_hidden(feature), start + offset, cached)
        return self.tree_behind(hidden, cached, start + len(tokens), shape)

    def tree_behind(self, hidden: Tensor, cached: Cached, position: int, shape: Shape) -> TokenTree:
        """Grow the tree at that position, after a slot of this hidden state, whose own part is the
        last of `cached`."""
        # (score, created, token, parent, hidden it was predicted from, cache before it)
        found: list[tuple[float, int, int, int, Tensor, Cached]] = []
        frontier = self._children(found, -1, 0.0, hidden, cached, shape.width)
        for _ in range(shape.depth - 1):
            grown = []
            for node in frontier:
                score, _, token, _, before, cache = found[node]
                depth = len(cache) - len(cached)
                after, longer = self.step(token, before, position + depth, cache)
                grown += self._children(found, node, score, after, longer, shape.width)
            frontier = sorted(grown, key=lambda node: (-found[node][0], node))[: shape.width]
        best = sorted(
            sorted(range(len(found)), key=lambda node: (-found[node][0], node))[: shape.nodes]
        )
        place = {old: new for new, old in enumerate(best)} | {-1: -1}
        return TokenTree(
            tuple(found[node][2] for node in best), tuple(place[found[node][3]] for node in best)
        )

    def _children(
        self,
        found: list[tuple[float, int, int, int, Tensor, Cached]],
        parent: int,
        score: float,
        hidden: Tensor,
        cached: Cached,
        width: int,
    ) -> list[int]:
        values, tokens = self.log_p(hidden).topk(width)
        first = len(found)
        for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
            found.append((score + value, len(found), token, parent, hidden, cached))
        return list(range(first, len(found)))


@dataclass
class CheckedDrafter:
    """A drafter of which every fourth tree is compared with the oracle's, grown from all the slots
    of the request.

    Trees may differ if two candidates have equal scores up to rounding; `num_equal` of `num_trees`
    were the same.
    """

    drafter: Drafter
    oracle: TreeOracle
    shape: Shape
    slots: dict[int, list[Slot]] = field(default_factory=dict)
    known: dict[int, list[tuple[Slot, Tensor, Kept]]] = field(
        default_factory=dict
    )  # hidden states of slots so far
    num_calls: int = 0
    num_trees: int = 0
    num_equal: int = 0

    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        trees = self.drafter.propose(batch, output, runs)
        assert isinstance(batch.spec_info, SpecInfo)
        self._follow(batch, output, {run.row: run for run in runs})
        for run, tree in zip(runs, trees, strict=True):
            if not batch.spec_info.rows[run.row].num_draft_tokens:
                assert tree == TokenTree()
                continue
            self.num_calls += 1
            if self.num_calls % 4:
                continue  # the oracle takes its time
            self.num_trees += 1
            self.num_equal += tree == self._expected(batch.request_keys[run.row])
        return trees

    def _expected(self, key: int) -> TokenTree:
        """Continue the oracle after the slots that it knows of the request's last tree."""
        slots, known = self.slots[key], self.known.get(key, [])
        known = [
            each
            for slot, each in takewhile(
                lambda pair: pair[0] is pair[1][0], zip(slots, known, strict=False)
            )
        ]
        cached = [kept for *_, kept in known]
        for slot in slots[len(known) :]:
            position, feature, token = slot
            hidden, cached = self.oracle.step(
                token, self.oracle.first_hidden(feature), position, cached
            )
            known.append((slot, hidden, cached[-1]))
        self.known[key] = known
        (position, _, _), hidden, _ = known[-1]
        return self.oracle.tree_behind(hidden, cached, position + 1, self.shape)

    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        return self.drafter.begin(batch)

    def _follow(
        self, batch: ForwardBatch, output: StageOutput, runs: Mapping[int, AcceptedRun]
    ) -> None:
        assert isinstance(batch.spec_info, SpecInfo)
        features = torch.cat([output.aux_hidden[layer_id] for layer_id in self.oracle.layers], -1)
        tokens, first = batch.spec_info.token_ids.tolist(), 0
        for row, (key, length, start) in enumerate(
            zip(batch.request_keys, batch.query_lens, batch.context_lens, strict=True)
        ):
            run, spec = runs.get(row), batch.spec_info.rows[row]
            verified = run is not None and batch.mode is ForwardMode.VERIFY
            nodes = list(run.accepted) if run is not None and verified else list(range(length))
            following = [tokens[first + node] for node in nodes[1:]]
            following.append(
                run.tokens[-1].token_id if run is not None else spec.next_token_id or 0
            )
            kept = [
                slot for slot in self.slots.get(key, []) if slot[0] < start
            ]  # a replay begins again
            if start < spec.draft_start or spec.num_draft_tokens is None:
                kept, nodes, following = [], [], []
            kept = [slot for slot in kept if slot[0] >= spec.draft_start]
            self.slots[key] = kept + [
                (start + depth, features[first + node], token)
                for depth, (node, token) in enumerate(zip(nodes, following, strict=True))
            ]
            first += length
