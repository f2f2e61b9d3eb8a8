"""Log-probabilities of tokens that are known: what the model made of a prompt.

Scored tokens travel through a batch as drawn ones do. Of a row that scores and draws the scored logits come first, so a
row's logits lie in the order of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.request import DrawnToken
from engine.sampling.sampler import token_logprobs
from runtime.errors import InternalError

Scores = tuple[DrawnToken, ...]


@dataclass(frozen=True)
class ScoredLogits:
    """Logits of one forward by their use: `drawing` [N, vocab] fp32 is None where the model gave none."""

    drawing: Tensor | None
    scores: list[Scores]  # per row that scores, in row order


def wanted_tokens(batch: ForwardBatch) -> list[int]:
    """Indices of the tokens whose logits a batch needs, ascending: the scored ones of each row, and of each row that
    draws its last token, or all of them where they are a tree under verification."""
    wanted: list[int] = []
    for start, end, num_scored, draws in _spans(batch):
        wanted += range(start, start + num_scored)
        if draws:
            wanted += range(start, end) if batch.mode is ForwardMode.VERIFY else [end - 1]
    return wanted


def score(logits: Tensor | None, batch: ForwardBatch) -> ScoredLogits:
    """Take the scored rows out of `logits`, which has a row for each of `wanted_tokens(batch)`.

    Each token's values come from its own row of logits alone, in double precision, so they do not depend on the batch.

    Raises:
        InternalError: the model gave another number of rows.
    """
    if not batch.scoring:
        return ScoredLogits(logits, [])
    wanted = wanted_tokens(batch)
    if (0 if logits is None else logits.shape[0]) != len(wanted):
        raise InternalError(f"a batch wants {len(wanted)} rows of logits, the model gave "
                            f"{0 if logits is None else logits.shape[0]}")
    if logits is None:
        return ScoredLogits(None, [])
    drawing: list[int] = []
    scores: list[Scores] = []
    at = 0
    for row, (start, end, num_scored, draws) in enumerate(_spans(batch)):
        scoring = batch.scoring[row]
        if scoring is not None:
            scores.append(_scores(logits[at:at + num_scored], scoring.next_token_ids, scoring.num_top))
        num_drawing = (end - start if batch.mode is ForwardMode.VERIFY else 1) if draws else 0
        drawing += range(at + num_scored, at + num_scored + num_drawing)
        at += num_scored + num_drawing
    return ScoredLogits(logits[torch.tensor(drawing, dtype=torch.long)], scores)


def _scores(logits: Tensor, token_ids: Sequence[int], num_top: int) -> Scores:
    rows = logits.detach().cpu().numpy()
    return tuple(DrawnToken(token_id, token_logprobs(row.astype(np.float64), token_id, num_top))
                 for row, token_id in zip(rows, token_ids, strict=True))


def _spans(batch: ForwardBatch) -> list[tuple[int, int, int, bool]]:
    """(first token, end, scored tokens, whether it draws) per row."""
    spans, start = [], 0
    scoring = batch.scoring or (None,) * batch.num_rows
    for length, sampling, scored in zip(batch.query_lens, batch.sampling, scoring, strict=True):
        num_scored = 0 if scored is None else len(scored.next_token_ids)
        spans.append((start, start + length, num_scored, sampling is not None and length > 0))
        start += length
    return spans
