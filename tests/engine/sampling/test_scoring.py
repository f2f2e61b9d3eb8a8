"""Scores of known tokens: wanted logits, their rows, and values by hand."""

import math
from dataclasses import replace

import pytest
import torch

from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow, ScoringRow
from engine.core.request import Request, SamplingParams
from engine.core.rows import Row, build_batch, scoring_row
from engine.sampling.sampler import score, wanted_tokens
from runtime.errors import InternalError

SAMPLED = SamplingRow(SamplingParams(), position=0)


def row(key: int, length: int, *, scores: int | None = None, samples: bool = False) -> Row:
    scoring = None if scores is None else ScoringRow(tuple(range(scores)), num_top=1)
    return Row(key, list(range(length)), 0, [1], 0, SAMPLED if samples else None, scoring=scoring)


def test_a_prompt_is_scored_by_the_tokens_that_follow() -> None:
    request = Request("r", (5, 6, 7, 8, 9), 1, num_prompt_logprobs=3)
    assert scoring_row(request, 0, 2) == ScoringRow((6, 7), 3)
    assert scoring_row(request, 2, 5) == ScoringRow((8, 9), 3), "nothing follows the last token"
    assert scoring_row(replace(request, num_prompt_logprobs=None), 0, 2) is None


def test_rows_list_scored_tokens_and_then_sampled_ones() -> None:
    rows = [
        row(1, 3, scores=3),
        row(2, 4),
        row(3, 3, scores=2, samples=True),
        row(4, 2, samples=True),
    ]
    assert wanted_tokens(build_batch(ForwardMode.PREFILL, rows)) == [0, 1, 2, 7, 8, 9, 11]
    assert wanted_tokens(build_batch(ForwardMode.PREFILL, rows[1:2])) == []


def scored_batch() -> ForwardBatch:
    return build_batch(
        ForwardMode.PREFILL, [row(1, 3, samples=True), row(2, 3, scores=2, samples=True)]
    )


def test_scores_are_log_probabilities_of_the_token_that_follows() -> None:
    """Each row of logits is [0, ln 3]: probabilities 1/4 and 3/4."""
    logits = torch.tensor([[9.0, 8.0], [0.0, math.log(3)], [0.0, math.log(3)], [7.0, 6.0]])
    scored = score(logits, scored_batch())
    assert scored.sampled is not None
    assert scored.sampled.tolist() == [[9.0, 8.0], [7.0, 6.0]]
    (tokens,) = scored.scores
    values = [
        (token.token_id, token.logprobs.logprob, token.logprobs.top)
        for token in tokens
        if token.logprobs
    ]
    (first, low, top), (second, high, _) = values
    assert (first, second) == (0, 1)
    assert [low, high] == pytest.approx([math.log(1 / 4), math.log(3 / 4)], rel=1e-6)
    assert top == ((1, high),)


def test_a_missing_row_of_logits_is_a_bug_not_a_score() -> None:
    with pytest.raises(InternalError, match="wants 4 rows of logits, the model returned 3"):
        score(torch.zeros(3, 2), scored_batch())


def test_rows_that_score_share_batches_with_those_that_do_not() -> None:
    plain = build_batch(ForwardMode.PREFILL, [row(1, 2)])
    scoring = build_batch(ForwardMode.PREFILL, [row(2, 2, scores=2)])
    both = build_batch(ForwardMode.PREFILL, [row(1, 2), row(2, 2, scores=2)])
    assert plain.scoring == ()
    assert both.scoring == (None, scoring.scoring[0])
    assert both.filter([1]).scoring == scoring.scoring
    assert (
        score(torch.zeros(1, 4), build_batch(ForwardMode.DECODE, [row(1, 1, samples=True)])).scores
        == []
    )
