"""A draft that follows by captured forwards and one that does so eagerly propose the same trees."""

import torch

from engine.backends.cuda.flashinfer import FlashInferAttention
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardMode, SamplingRow
from engine.core.draft_trees import SpecRow, TokenTree
from engine.core.request import SampledToken, SamplingParams
from engine.core.rows import Row, build_batch
from engine.graphs.buckets import extend_buckets
from engine.kernels.device.cache import write_kv
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.attention.multistep_device import DeviceRounds
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.eagle import EagleDrafter
from engine.speculative.replay.draft_graphs import DraftGraphs
from engine.speculative.replay.round_graphs import RoundGraphs
from engine.speculative.trees.tree_expander import TreeExpander
from tests.engine.speculative.test_plan_marker import (
    GEOMETRY,
    HIDDEN,
    PAGE_SIZE,
    ToyDraft,
    round_batch,
)
from tests.support.device.capture import RecordingCapture
from tests.support.kernels.flashinfer import FakeWrappers

CPU = torch.device("cpu")
MAX_ROWS, NODES = 3, 4


class Draft:
    """A draft over pages of NaN, the null page included."""

    def __init__(self, *, is_captured: bool) -> None:
        self.pools = {0: torch.full((20, 2, 1, PAGE_SIZE, HIDDEN), float("nan"))}
        self.paged = FlashInferAttention(
            kv_pools=self.pools,
            geometry=GEOMETRY,
            wrappers=FakeWrappers(),
            device=CPU,
            write_kv=write_kv,
        )
        model, self.capture = ToyDraft(), RecordingCapture([self.paged])
        self.rounds = DeviceRounds(
            kv_pools=self.pools, geometry=GEOMETRY, wrappers=FakeWrappers(), device=CPU
        )
        attention = DraftAttention.over_kv(self.paged, self.rounds, PAGE_SIZE)
        self.capture.planners = [self.paged, self.rounds]
        graphs = rounds = None
        if is_captured:
            graphs = DraftGraphs(
                model=model,
                attention=self.paged,
                context=attention.on_pages,
                width=HIDDEN,
                buckets=extend_buckets(MAX_ROWS, NODES),
                capture=self.capture,
                dtype=torch.float32,
                device=CPU,
            )
            graphs.capture_all()
            expander = TreeExpander(
                model=model, rounds=self.rounds, context=attention.in_round, topk=2
            )
            rounds = RoundGraphs(
                expander=expander,
                rounds=self.rounds,
                max_rows=MAX_ROWS,
                topk=2,
                steps=3,
                width=HIDDEN,
                capture=self.capture,
                dtype=torch.float32,
                device=CPU,
            )
            rounds.capture_all()
            self.captured_rounds = rounds
        self.drafter = EagleDrafter(
            model=model, attention=attention, topk=2, steps=3, graphs=graphs, rounds=rounds
        )

    def propose(
        self, rows: dict[int, tuple[int, int]], *, mode: ForwardMode, seed: int
    ) -> list[TokenTree]:
        """Propose trees. rows: per request its context and the number of tokens the draft follows,
        which are all the row brings."""
        batch = build_batch(
            mode,
            [
                Row(
                    key,
                    [3 + key] * count,
                    context,
                    list(range(1 + 4 * key, 5 + 4 * key)),
                    0,
                    SamplingRow(SamplingParams(), 0),
                    SpecRow(parents=tuple(range(-1, count - 1)), num_draft_tokens=5),
                )
                for key, (context, count) in rows.items()
            ],
        )
        runs = [
            AcceptedRun(
                row, list(range(count)), [SampledToken(7 + row + place) for place in range(count)]
            )
            for row, (_, count) in enumerate(rows.values())
        ]
        hidden = torch.randn(
            batch.num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)
        )
        return self.drafter.propose(batch, StageOutput(aux_hidden={0: hidden}), runs)

    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.capture.graphs)


def test_s1_3_a_draft_follows_captured_as_it_does_eagerly() -> None:
    captured, eager = Draft(is_captured=True), Draft(is_captured=False)
    prompts = {0: (0, 20), 1: (0, 3), 2: (0, 15)}
    steps: list[dict[int, tuple[int, int]]] = [
        {0: (20, 4), 1: (3, 1), 2: (15, 2)},
        {1: (4, 3)},
        {2: (17, 1), 0: (24, 1)},
        {0: (25, 4), 1: (7, 4), 2: (18, 4)},
    ]
    for seed, rows in enumerate([prompts, *steps]):
        mode = ForwardMode.VERIFY if seed else ForwardMode.PREFILL
        trees = [draft.propose(rows, mode=mode, seed=seed) for draft in (captured, eager)]
        assert trees[0] == trees[1]
        assert all(len(tree) == 5 for tree in trees[0])
        assert torch.equal(
            captured.pools[0][1:].nan_to_num(7.0), eager.pools[0][1:].nan_to_num(7.0)
        )
    assert captured.num_replays() == len(steps) + len(
        [prompts, *steps]
    )  # passes over what was accepted, and rounds
    assert (
        captured.drafter.num_plans
        == eager.drafter.num_plans
        == {"draft_extend": 5, "draft_round": 5}
    )


def test_s1_3_a_round_planned_outside_is_not_replayed_from_a_graph() -> None:
    draft, batch = Draft(is_captured=True), round_batch(branches=2)
    assert draft.captured_rounds.bucket_for(batch, 3) is not None
    draft.rounds.plan(batch)
    assert draft.captured_rounds.bucket_for(batch, 3) is None
