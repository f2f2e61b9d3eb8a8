"""Walking a tree: the same tokens as plain decoding, and so the target's distribution."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.draft_trees import SpecInfo, SpecRow, TokenTree, ancestors
from engine.core.request import Request, SampledToken, SamplingParams
from engine.core.rows import Row, build_batch, sampling_row
from engine.sampling.sampler import sample
from engine.speculative.contracts.verify import AcceptedRun, sample_runs, sampling_at

VOCAB, PROMPT = 5, (1, 2, 3)
PARAMS = st.sampled_from(
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.3),
        SamplingParams(temperature=0, frequency_penalty=0.7, presence_penalty=0.3),
        SamplingParams(temperature=1.3, seed=6, top_k=3, logit_bias=((1, 2.0),)),
    ]
)


def target(path: tuple[int, ...]) -> Tensor:
    """Return the toy target's logits [vocab] after prompt + path."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(path) % 2**31)).mul(1.5)


def plain(request: Request, outputs: list[int], count: int) -> list[SampledToken]:
    """Decode one token at a time."""
    outputs, drawn = list(outputs), []
    for _ in range(count):
        drawn += sample(target(tuple(outputs))[None], [sampling_row(request, outputs)])
        outputs.append(drawn[-1].token_id)
    return drawn


def verify_batch(
    rows: list[tuple[Request, list[int], TokenTree]], *, poison: bool = False
) -> tuple[ForwardBatch, Tensor]:
    """Build a VERIFY batch of (request, outputs, tree) and the toy target's logits at every
    node."""
    built, info, logits = [], [], []
    for key, (request, outputs, tree) in enumerate(rows):
        tokens = [outputs[-1], *tree.token_ids]
        built.append(
            Row(key, tokens, len(PROMPT) + len(outputs) - 1, [1], 0, sampling_row(request, outputs))
        )
        info.append(SpecRow(parents=tree.rooted_parents))
        for node in range(len(tokens)):
            path = [tokens[i] for i in ancestors(tree.rooted_parents, node)[1:]]
            logits.append(target((*outputs, *path)))
    batch = build_batch(ForwardMode.VERIFY, built)
    assert batch.token_ids is not None
    batch.spec_info = SpecInfo(batch.token_ids, tuple(info))
    return batch, torch.stack(logits)


TREES = st.integers(0, 14).flatmap(
    lambda size: st.builds(
        TokenTree,
        st.tuples(*(st.integers(0, VOCAB - 1) for _ in range(size))),
        st.tuples(*(st.integers(-1, i - 1) for i in range(size))),
    )
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            PARAMS,
            TREES,
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=3,
    ),
    num_top=st.sampled_from([None, 2]),
)
def test_any_tree_emits_what_plain_decoding_does(
    rows: list[tuple[SamplingParams, TokenTree, list[int], int]], num_top: int | None
) -> None:
    requests = [
        Request(
            "r",
            PROMPT,
            99,
            params,
            min_tokens=min_tokens,
            stop_token_ids=frozenset({0, 4}),
            num_top_logprobs=num_top,
        )
        for params, _, _, min_tokens in rows
    ]
    batch, logits = verify_batch(
        [
            (request, outputs, tree)
            for request, (_, tree, outputs, _) in zip(requests, rows, strict=True)
        ]
    )
    runs = sample_runs(logits, batch, sample)
    for run, request, (_, tree, outputs, _) in zip(runs, requests, rows, strict=True):
        assert run.tokens == plain(request, outputs, len(run.tokens))
        path = [tree.token_ids[node - 1] for node in run.accepted[1:]]
        assert path == [token.token_id for token in run.tokens[:-1]], (
            "accepted nodes are the tokens drawn"
        )
        assert len(run.accepted) == len(run.tokens)
        children = {
            tree.token_ids[i]
            for i, parent in enumerate(tree.parents)
            if parent + 1 == run.accepted[-1]
        }
        assert run.tokens[-1].token_id not in children, "the walk went as far as the tree allows"


def test_greedy_rows_are_sampled_in_one_call() -> None:
    request, tree = (
        Request("r", PROMPT, 99, SamplingParams(temperature=0)),
        TokenTree((1, 2, 3), (-1, 0, 1)),
    )
    tokens = [token.token_id for token in plain(request, [0], 3)]
    right = TokenTree(tuple(tokens), (-1, 0, 1))
    batch, logits = verify_batch([(request, [0], tree), (request, [0], right)])
    calls = []

    def counted(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        calls.append(len(rows))
        return sample(logits, rows)

    runs = sample_runs(logits, batch, counted)
    assert calls == [8]
    assert runs[1].accepted == [0, 1, 2, 3]
    assert runs[1].tokens == plain(request, [0], 4)


def test_a_tree_that_is_always_right_is_accepted_whole() -> None:
    request = Request("r", PROMPT, 99, SamplingParams(temperature=1.0, seed=11))
    right = [token.token_id for token in plain(request, [3], 6)]
    tree = TokenTree(tuple(right[:5]), tuple(range(-1, 4)))
    batch, logits = verify_batch([(request, [3], tree)])
    (run,) = sample_runs(logits, batch, sample)
    assert run.accepted == [0, 1, 2, 3, 4, 5]
    assert [token.token_id for token in run.tokens] == right


def test_rejected_nodes_may_hold_anything() -> None:
    request = Request("r", PROMPT, 99, SamplingParams(temperature=0))
    best = int(target((3,)).argmax())
    wrong = (best + 1) % VOCAB
    tree = TokenTree((wrong, best, wrong), (-1, -1, 0))
    batch, logits = verify_batch([(request, [3], tree)])
    poisoned = logits.clone()
    poisoned[[1, 3]] = math.nan
    assert sample_runs(poisoned, batch, sample) == sample_runs(logits, batch, sample)


def test_rows_that_draw_nothing_are_left_out() -> None:
    request = Request("r", PROMPT, 99, SamplingParams(temperature=0))
    batch, logits = verify_batch(
        [(request, [3], TokenTree()), (request, [4], TokenTree((1,), (-1,)))]
    )
    batch.sampling = (None, batch.sampling[1])
    runs = sample_runs(logits[1:], batch, sample)
    assert [run.row for run in runs] == [1]


def test_a_batch_without_trees_samples_one_token_per_row() -> None:
    request = Request("r", PROMPT, 99, SamplingParams(temperature=0))
    row = Row(1, [3], len(PROMPT), [1], 0, sampling_row(request, [3]))
    batch = build_batch(ForwardMode.DECODE, [row])
    token = SampledToken(int(target((3,)).argmax()))
    assert sample_runs(target((3,))[None], batch, sample) == [AcceptedRun(0, [0], [token])]


def test_bans_end_with_min_tokens() -> None:
    request = Request("r", PROMPT, 99, min_tokens=3, stop_token_ids=frozenset({4}))
    row = sampling_row(request, [1])
    assert [sampling_at(row, [1] * depth) for depth in range(3)] == [
        sampling_row(request, [1] * (depth + 1)) for depth in range(3)
    ]
    assert [bool(sampling_at(row, [1] * depth).banned_token_ids) for depth in range(3)] == [
        True,
        True,
        False,
    ]


def test_sampled_runs_follow_the_targets_distribution() -> None:
    """Three tokens through a two-level tree, 4000 seeds: frequencies of whole continuations against
    their probability. The bound is twice the total variation that a fair sample of this size has on
    average."""
    count, frequencies = 4000, Counter[tuple[int, ...]]()
    tree = TokenTree((0, 1, 2, 3), (-1, -1, 0, 1))
    for seed in range(count):
        request = Request("r", PROMPT, 99, SamplingParams(temperature=1.0, seed=seed))
        outputs = [2]
        while len(outputs) < 3:
            batch, logits = verify_batch([(request, outputs, tree)])
            outputs += [token.token_id for token in sample_runs(logits, batch, sample)[0].tokens]
        frequencies[tuple(outputs[1:3])] += 1
    distance = noise = 0.0
    for first in range(VOCAB):
        for second in range(VOCAB):
            p = float(target((2,)).softmax(-1)[first] * target((2, first)).softmax(-1)[second])
            distance += abs(frequencies[first, second] / count - p) / 2
            noise += (
                math.sqrt(2 * p * (1 - p) / (math.pi * count)) / 2
            )  # expected |frequency - p| / 2
    assert distance < 2 * noise
