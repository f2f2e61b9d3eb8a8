"""Drafters that know everything or nothing, to make verification accept or reject what a test
wants."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.contracts.attention import AttentionGeometry
from engine.contracts.model import ForwardContext, StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.draft_trees import SpecInfo, SpecRow, TokenTree
from engine.core.request import SampledToken, SamplingParams
from engine.core.rows import Row, build_batch
from engine.memory.layout import CacheSpec
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.attention.multistep import MultiStepAttention
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.eagle import EagleDrafter
from tests.support.models.tiny_models import VOCAB_SIZE


@dataclass(frozen=True)
class Shape:
    """Children per node, levels, drafted nodes in all. Width 1 is a chain."""

    width: int
    depth: int
    nodes: int


CHAINS = {"chain 1": Shape(1, 1, 1), "chain 3": Shape(1, 3, 3), "chain 5": Shape(1, 5, 5)}
TREES = {"tree 4x4/15": Shape(4, 4, 15), "tree 8x5/31": Shape(8, 5, 31)}


@dataclass
class OracleDrafter:
    """A drafter that puts a request's true continuation into every tree, among siblings that are
    wrong.

    `truth` maps a batch key to the tokens of prompt and output. With `error_rate` it departs from
    the truth at some levels; without truth (`truth` empty) it only guesses. `accepted` records how
    many drafted tokens each step accepted.
    """

    shape: Shape
    truth: Mapping[int, Sequence[int]] = field(default_factory=dict)
    error_rate: float = 0.0
    vocab_size: int = VOCAB_SIZE
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    accepted: list[int] = field(default_factory=list)
    num_calls: int = 0

    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        assert isinstance(batch.spec_info, SpecInfo)
        self.num_calls += 1
        trees = []
        for run in runs:
            self.accepted.append(len(run.accepted) - 1)
            sampling = batch.sampling[run.row]
            assert sampling is not None
            after = sampling.position + len(run.tokens)
            truth = list(self.truth.get(batch.request_keys[run.row], ()))[
                after : after + self.shape.depth
            ]
            trees.append(
                self._tree(truth).first(batch.spec_info.rows[run.row].num_draft_tokens or 0)
            )
        return trees

    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        return [TokenTree()] * batch.num_rows

    def _tree(self, truth: list[int]) -> TokenTree:
        """Grow a tree level by level; the path to follow is a random node of each level, so that
        siblings precede it."""
        tokens: list[int] = []
        parents: list[int] = []
        level, path = [-1], -1
        for depth in range(self.shape.depth):
            children = [
                (parent, self.rng.randrange(self.vocab_size))
                for parent in level
                for _ in range(self.shape.width)
            ][: self.shape.width]
            place = self.rng.randrange(len(children))
            children[place] = (path, children[place][1])
            if depth < len(truth) and self.rng.random() >= self.error_rate:
                children[place] = (path, truth[depth])
            first = len(tokens)
            parents += [parent for parent, _ in children]
            tokens += [token for _, token in children]
            level, path = list(range(first, len(tokens))), first + place
        count = min(self.shape.nodes, len(tokens))
        return TokenTree(tuple(tokens[:count]), tuple(parents[:count]))


class KnowingModel:
    """A `DraftModel` with the cache of a real one and the tokens of one request: `truth` is its
    prompt and output.

    Its hidden state is the position of the slot, so that a wrong one predicts a wrong token.
    """

    def __init__(self, model: DraftModel, truth: Sequence[int]) -> None:
        self._model = model
        self._truth = [*truth, *[0] * 64]
        self.capture_layers, self.vocab_size = model.capture_layers, VOCAB_SIZE
        self.attention_geometry, self.cache_specs = model.attention_geometry, model.cache_specs

    def features(self, aux_hidden: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        return torch.zeros_like(self._model.features(aux_hidden, tokens))

    def forward(self, batch: ForwardBatch, hidden: Tensor, context: ForwardContext) -> Tensor:
        self._model.forward(batch, hidden, context)
        return (
            torch.zeros_like(hidden).index_fill(1, torch.tensor([0]), 1) * batch.positions[:, None]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        known = torch.tensor([self._truth[int(position) + 2] for position in hidden[:, 0]])
        return 40.0 * torch.nn.functional.one_hot(known, VOCAB_SIZE)

    def target_ids(self, token_ids: Tensor) -> Tensor:
        return token_ids


def chain_behind(
    model: DraftModel,
    specs: Sequence[CacheSpec],
    prompt: Sequence[int],
    drawn: int,
    hidden: Mapping[int, Tensor],
) -> TokenTree:
    """Return four tokens that an `EagleDrafter` proposes after a prompt and its first token.
    hidden: [T, H] of the target's layers that the draft reads."""
    geometry = model.attention_geometry(16)
    assert isinstance(geometry, AttentionGeometry)
    pools = {spec.layer_id: torch.full((8, *spec.record_shape), float("nan")) for spec in specs}
    attention = DraftAttention.over_kv(
        CpuAttention(kv_pools=pools, geometry=geometry),
        MultiStepAttention(kv_pools=pools, geometry=geometry),
        geometry.page_size,
    )
    batch = build_batch(
        ForwardMode.PREFILL,
        [
            Row(
                1,
                prompt,
                0,
                [3, 5],
                0,
                SamplingRow(SamplingParams(), 0),
                SpecRow(num_draft_tokens=4),
            )
        ],
    )
    (tree,) = EagleDrafter(model=model, topk=1, steps=4, attention=attention).propose(
        batch, StageOutput(aux_hidden=dict(hidden)), [AcceptedRun(0, [0], [SampledToken(drawn)])]
    )
    return tree


def always(drafter: OracleDrafter) -> Callable[[int], OracleDrafter]:
    """Return a builder for `Speculation` that returns this drafter for any number of pages."""
    return lambda num_pages: drafter
