"""Output that the last stage keeps of requests: sampling from it equals sampling from the whole
output, and a step sends changes only."""

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode, OutputOpening, OutputRow, SamplingRow
from engine.core.draft_trees import SpecRow
from engine.core.request import ProblemCause, Request, SampledToken, SamplingParams
from engine.core.rows import Row, build_batch, sampling_row
from engine.sampling.guided import GuidedSampler
from engine.sampling.sampler import TokenCounts, sample
from engine.speculative.contracts.verify import sample_runs, sampling_at
from tests.support.models.tiny_models import LLAMA, tiny
from tests.support.pool import local_pool as pools

VOCAB = 50
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
PENALTIES = SamplingParams(
    temperature=0.9, seed=7, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3
)


@given(prompt=TOKENS, moves=st.lists(st.tuples(st.integers(0, 20), TOKENS), max_size=12))
def test_counts_follow_the_output_when_it_moves(
    prompt: list[int], moves: list[tuple[int, list[int]]]
) -> None:
    counts, output = TokenCounts(prompt, VOCAB), list[int]()
    for kept, new in moves:
        kept = min(kept, len(output))
        counts.move(kept, new)
        output = output[:kept] + new
        ids, occurrences = counts.output
        assert dict(zip(ids.tolist(), occurrences.tolist(), strict=True)) == Counter(output)
        assert counts.seen.tolist() == sorted({*prompt, *output})


def test_an_output_that_is_not_known_so_far_is_an_error() -> None:
    with pytest.raises(IndexError, match="3 tokens are to be kept, 0 are known"):
        TokenCounts((), VOCAB).move(3, ())


def request(name: str, prompt: tuple[int, ...], params: SamplingParams = PENALTIES) -> Request:
    return Request(name, prompt, 64, params)


def logits_after(output: Sequence[int]) -> Tensor:
    return (
        torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(hash(tuple(output)) % 2**31))
        * 3
    )


@pytest.mark.parametrize("seed", range(5))
def test_sampling_from_changes_equals_sampling_from_the_whole(seed: int) -> None:
    """Two requests run through trees whose nodes are partly accepted; every sample equals that of a
    row that carries its whole output."""
    rng, sampler = random.Random(seed), GuidedSampler(None)
    asked = [request("a", (1, 2, 3)), request("b", (4,))]
    outputs: list[list[int]] = [[], []]
    known: list[int | None] = [None, None]
    for _ in range(12):
        rows = []
        for key, (one, output) in enumerate(zip(asked, outputs, strict=True), start=1):
            tree = [rng.randrange(VOCAB) for _ in range(rng.randrange(5))]
            parents = (-1, *(rng.randrange(node) for node in range(1, len(tree) + 1)))
            drawing = sampling_row(one, output, key=key, known=known[key - 1], is_only=False)
            known[key - 1] = len(output)
            rows.append((drawing, Row(key, [0, *tree], 0, [1], 0, drawing, SpecRow(parents))))
        batch = build_batch(ForwardMode.VERIFY, [row for _, row in rows])
        paths = [
            path
            for (_, row), output in zip(rows, outputs, strict=True)
            for path in paths_of(row, output)
        ]
        sampler.prepare(batch)
        runs = sample_runs(torch.cat([logits_after(path) for path in paths]), batch, sampler)
        for one, output, run in zip(asked, outputs, runs, strict=True):
            for token in run.tokens:
                assert [token] == sample(logits_after(output), [sampling_row(one, output)])
                output.append(token.token_id)
            del output[
                len(output) - rng.randrange(2) * (len(run.tokens) > 1) :
            ]  # as a stop token in between does
    assert min(map(len, outputs)) > 12 - 2


def paths_of(row: Row, output: list[int]) -> list[list[int]]:
    """Return the output at each node of a row's tree."""
    assert row.spec is not None
    found = [output]
    for node, token in enumerate(row.token_ids[1:], start=1):
        found.append([*found[row.spec.parents[node]], token])
    return found


def test_a_row_about_an_unknown_output_fails_alone() -> None:
    """As when the stage was replaced and its leader was not: never a wrong token."""
    sampler = GuidedSampler(None)
    stranger = SamplingRow(PENALTIES, 10, output=OutputRow(5, 7, (1,)))
    fine = sampling_row(request("b", (1, 2)), (3,))
    drawn = sampler(torch.zeros(2, VOCAB), [stranger, fine])
    assert drawn[0].cause is ProblemCause.DEFECT
    assert "does not know the output of this request" in drawn[0].problem
    assert [drawn[1]] == sample(torch.zeros(1, VOCAB), [fine])


def test_output_kept_for_another_leader_is_dropped() -> None:
    sampler, logits = GuidedSampler(None), torch.zeros(1, VOCAB)
    first, second = request("a", (1, 2)), request("b", (3,))
    sampler(logits, [sampling_row(first, (4, 5), key=1, is_only=False)])
    assert sampler(logits, [sampling_row(second, (6,), key=1, is_only=False)]) == sample(
        logits, [sampling_row(second, (6,))]
    ), "an opening starts over"
    sampler.reset()
    (token,) = sampler(logits, [sampling_row(second, (6, 7), key=1, known=1, is_only=False)])
    assert token.cause is ProblemCause.DEFECT


class Spy(GuidedSampler):
    """Remembers what batches brought."""

    last: "Spy"

    def __init__(self, grammars: None) -> None:
        super().__init__(grammars)
        self.rows: list[OutputRow] = []
        Spy.last = self

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        self.rows += [
            row.output for row in batch.sampling if row is not None and row.output is not None
        ]


@pytest.mark.parametrize(("size", "num_pages"), [(1, 64), (2, 64), (1, 14)])
def test_frames_bring_a_prompt_once_and_each_token_once(
    size: int, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of requests that were set back for lack of pages. What is over is forgotten."""
    monkeypatch.setattr(pools, "GuidedSampler", Spy)
    torch.set_num_threads(1)
    asked = [
        request(
            name,
            tuple(range(3, 43)),
            SamplingParams(temperature=1, seed=seed, frequency_penalty=0.5),
        )
        for seed, name in enumerate("abc")
    ]
    with pools.local_pool(tiny(LLAMA, "bfloat16"), size, num_pages=num_pages) as pool:
        answers = pool.generate(asked)
        assert all(answer.finished is not None for answer in answers)
        if num_pages < 64:
            assert any(
                answer.finished is not None and answer.finished.num_preemptions
                for answer in answers
            )
        spy = Spy.last
        for key in {row.key for row in spy.rows}:
            rows = [row for row in spy.rows if row.key == key]
            assert [row.opening is not None for row in rows] == [True] + [False] * (len(rows) - 1)
            assert sum(len(row.token_ids) for row in rows) <= 64
            assert all(row.kept + len(row.token_ids) == at for at, row in enumerate(rows))
        assert spy._kept.keys() <= {row.key for row in spy.rows}
        pool.generate([request("d", (1, 2), SamplingParams(temperature=0))])
        assert not spy._kept, "the next batch has named those that are over"


def test_sampling_cost_does_not_grow_with_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted: a step of a request with 100,000 tokens touches one of them."""
    touched = []
    fromiter = np.fromiter

    def counting(values: Sequence[int], dtype: type) -> object:
        touched.append(len(values))
        return fromiter(values, dtype)

    sampler, prompt = GuidedSampler(None), tuple(token % VOCAB for token in range(100_000))
    long = request("long", prompt)
    logits, output = torch.zeros(1, VOCAB), list[int]()
    sampler(logits, [sampling_row(long, output, key=1, is_only=False)])
    monkeypatch.setattr("engine.sampling.sampler.np.fromiter", counting)
    for step in range(5):
        output.append(step)
        drawn: list[SampledToken] = sampler(
            logits, [sampling_row(long, output, key=1, known=step, is_only=False)]
        )
        assert not drawn[0].problem
    assert max(touched) == 1


def test_a_node_brings_its_path() -> None:
    at = sampling_row(request("a", (1, 2)), (3,), key=1, known=1, is_only=False)
    assert at.output == OutputRow(1, 1, (), None)
    assert sampling_at(at, (4, 5)).output == OutputRow(1, 1, (4, 5), None)
    assert sampling_row(request("a", (1, 2)), (3,)).output == OutputRow(
        0, 0, (3,), OutputOpening((1, 2)), is_only=True
    )
