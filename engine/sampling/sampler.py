"""From logits to tokens and their log-probabilities. Draws one token per row: from the row to the
distribution, and a token from it. Pure: the same logits and the same row give the same token, in
any batch. In double precision, one row at a time: this makes the result independent of the batch,
and double precision keeps a running sum over 150,000 probabilities exact enough to invert.

Because the random number depends on (seed, position) alone, drawing at a node of a draft tree is
the same call with that node's logits and row: the walk over the tree emits exactly what plain
decoding would.

Tokens that are known, as those of a prompt, are scored: they travel through a batch as drawn ones
do. Of a row that scores and draws the scored logits come first, so a row's logits lie in the order
of its tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode, OutputRow, SamplingRow
from engine.core.numerics import HOST
from engine.core.request import DrawnToken, ProblemCause, TokenLogprobs
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.tokens.row_ops import largest_of_rows
from engine.kernels.host.tokens.sampling import NOT_HERE, draw_tokens
from engine.sampling.uniform import uniform
from runtime.errors import InternalError

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Scores = tuple[DrawnToken, ...]

_TEAM = Team()
_CHANGED_TOGETHER = 16  # rows: a copy of logits in double precision is 1.2 MB of 150,000


class TokenCounts:
    """Which tokens occur in a request's prompt, and how often in its output. Moves with the output:
    a step costs what it changes, whatever the context's length. Keeps 5 bytes per token of the
    vocabulary, and the output."""

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        self._in_prompt = np.zeros(vocab_size, np.bool_)
        self._in_prompt[np.fromiter(prompt_token_ids, np.int64)] = True
        self._counts = np.zeros(vocab_size, np.int32)
        self._output: list[int] = []

    def move(self, kept: int, token_ids: Sequence[int]) -> None:
        """The output is its first `kept` tokens, then `token_ids`. Raises IndexError if it is
        shorter than that."""
        if kept > len(self._output):
            raise IndexError(f"{kept} tokens are to stand, {len(self._output)} are known")
        np.subtract.at(self._counts, np.fromiter(self._output[kept:], np.int64), 1)
        del self._output[kept:]
        self._output += token_ids
        np.add.at(self._counts, np.fromiter(token_ids, np.int64), 1)

    @property
    def seen(self) -> Ids:
        """[n] ascending: tokens of prompt or output."""
        return np.flatnonzero(self._in_prompt | (self._counts > 0)).astype(np.int64)

    @property
    def output(self) -> tuple[Ids, Ids]:
        """[n] ascending: tokens of the output, and how often they occur."""
        ids = np.flatnonzero(self._counts).astype(np.int64)
        return ids, self._counts[ids].astype(np.int64)


def counts_of(output: OutputRow, vocab_size: int) -> TokenCounts:
    """Of a row that opens a request."""
    counts = TokenCounts(
        () if output.opening is None else output.opening.prompt_token_ids, vocab_size
    )
    counts.move(output.kept, output.token_ids)
    return counts


def changes_logits(row: SamplingRow) -> bool:
    """Whether the most likely token may differ from that of the raw logits."""
    return bool(row.banned_token_ids or row.params.logit_bias or row.params.needs_history)


def adjusted(logits: Floats, row: SamplingRow, counts: TokenCounts | None = None) -> Floats:
    """[V] logits after penalties, bias and bans, in this order; a copy. `counts` are those of the
    row's output; without them a row that opens its request is counted here.

    Repetition divides positive and multiplies negative logits of every token in prompt or output
    (Keskar et al., 2019); frequency is subtracted per occurrence in the output, presence once.
    """
    params, result = row.params, logits.copy()
    if params.needs_history and row.output is not None:
        counts = counts_of(row.output, len(logits)) if counts is None else counts
        seen = counts.seen
        values = result[seen]
        rate = params.repetition_penalty
        result[seen] = np.where(values > 0, values / rate, values * rate)
        ids, occurrences = counts.output
        result[ids] -= params.frequency_penalty * occurrences
        result[ids] -= params.presence_penalty
    for token_id, bias in params.logit_bias:
        result[token_id] += bias
    result[list(row.banned_token_ids)] = -np.inf
    return result


def largest(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest values, largest first, equal ones by id."""
    ids = _highest(values, count)
    return ids[np.argsort(-values[ids], kind="stable")]


def _highest(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest values, ascending; of equal ones the lower ids. Finds a threshold,
    sorts nothing."""
    if count >= len(values):
        return np.arange(len(values), dtype=np.int64)
    if count < 1:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    kept = values > threshold
    equal = np.flatnonzero(values == threshold)
    kept[equal[: count - int(kept.sum())]] = True
    return np.flatnonzero(kept)


Sampler = Callable[[Tensor, Sequence[SamplingRow]], list[DrawnToken]]


class RequestSampler(Protocol):
    """A `Sampler` that keeps state of requests, from their first row to the end that a batch
    names."""

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[DrawnToken]: ...

    def prepare(self, batch: ForwardBatch) -> None:
        """Before the batch's forward, what can be done without its logits."""
        ...

    def reset(self) -> None:
        """Drop every request."""
        ...


def sample(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    allowed: Sequence[Mask | None] = (),
    counts: Sequence[TokenCounts | None] = (),
) -> list[DrawnToken]:
    """One token per row. logits: [R, vocab] fp32, `rows` its R rows. If given, `allowed` has for
    each row None or [vocab] bool, tokens that may be drawn; `counts` what its penalties count, or
    None for a row that brings it all.

    Temperature 0 takes the largest logit (the lowest id among equals); otherwise the inverse of the
    cumulative distribution, in the order of token ids, at `uniform(seed, position)`. A row without
    a largest finite logit (NaN, infinity, or every token banned) gets token 0 with a problem that
    is a fault; it ends alone. What may be drawn is what passes top-k of the weights at that
    temperature, then top-p of what top-k left, then min-p; equal weights in the order of their ids,
    so exactly k tokens pass top-k.

    Raises:
        InternalError: `rows` does not fit `logits`.
    """
    if len(rows) != logits.shape[0]:
        raise InternalError(f"{logits.shape[0]} rows of logits came with {len(rows)} sampling rows")
    if not rows:
        return []
    if not allowed and all(takes_maximum(row) for row in rows):
        return _raw_maxima(logits)
    # In one copy: filters and the random number then run as on any other device, so every device
    # draws alike from the same logits.
    host = logits.detach().cpu().contiguous()
    masks, known = allowed or [None] * len(rows), counts or [None] * len(rows)
    changed = [
        index for index, row in enumerate(rows) if changes_logits(row) or masks[index] is not None
    ]
    if not changed:
        return _drawn(host, rows, host)
    raw = sorted({*range(len(rows))} - {*changed})
    of_raw = host[raw]
    tokens = dict(zip(raw, _drawn(of_raw, [rows[index] for index in raw], of_raw), strict=True))
    for first in range(0, len(changed), _CHANGED_TOGETHER):
        some = changed[first : first + _CHANGED_TOGETHER]
        finals = np.stack(
            [_changed(host[index], rows[index], masks[index], known[index]) for index in some]
        )
        tokens |= zip(
            some,
            _drawn(torch.from_numpy(finals), [rows[index] for index in some], host[some]),
            strict=True,
        )
    return [tokens[index] for index in range(len(rows))]


def _changed(
    logits: Tensor, row: SamplingRow, allowed: Mask | None, counts: TokenCounts | None
) -> Floats:
    final = adjusted(logits.numpy().astype(np.float64), row, counts)
    return final if allowed is None else np.where(allowed, final, -np.inf)


def _drawn(final: Tensor, rows: Sequence[SamplingRow], logits: Tensor) -> list[DrawnToken]:
    """From `final` [R, vocab], fp32 or fp64, which `logits` of the same shape became."""
    rules = [
        (
            params.temperature,
            float(params.top_k),
            params.top_p,
            params.min_p,
            uniform(params.seed, row.position) if params.temperature else 0.0,
        )
        for row in rows
        for params in (row.params,)
    ]
    tokens = []
    for index, (token_id, row) in enumerate(
        zip(draw_tokens(final, rules, _TEAM), rows, strict=True)
    ):
        if token_id == NOT_HERE:
            tokens.append(_fault(final[index].max().item()))  # NaN counts as largest
        elif row.num_top_logprobs is None:
            tokens.append(DrawnToken(token_id))
        else:
            raw = logits[index].numpy().astype(np.float64)
            tokens.append(DrawnToken(token_id, token_logprobs(raw, token_id, row.num_top_logprobs)))
    return tokens


def takes_maximum(row: SamplingRow) -> bool:
    """Whether the token is the largest of the raw logits, unless a grammar forbids it, and nothing
    else is returned."""
    return row.params.temperature == 0 and row.num_top_logprobs is None and not changes_logits(row)


def _raw_maxima(logits: Tensor) -> list[DrawnToken]:
    """All rows at once, where they are; one trip to the host. The first of equals; NaN counts as
    largest."""
    if logits.device == HOST and logits.dtype is torch.float32 and logits.is_contiguous():
        ids = largest_of_rows(logits, _TEAM)
        largest_values, token_ids = (
            logits.numpy()[np.arange(len(ids)), ids.numpy()].tolist(),
            ids.tolist(),
        )
    else:
        values, ids = logits.max(dim=-1)
        largest_values, token_ids = torch.stack([values.double(), ids.double()]).tolist()
    return [
        DrawnToken(int(token_id)) if math.isfinite(value) else _fault(value)
        for value, token_id in zip(largest_values, token_ids, strict=True)
    ]


def token_logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """The log-probability of a token in one row of logits [vocab], and of the `num_top` most likely
    ones."""
    peak = logits.max()
    logprobs = logits - (peak + np.log(np.exp(logits - peak).sum()))
    top = largest(logprobs, num_top)
    return TokenLogprobs(
        logprob=float(logprobs[token_id]),
        top=tuple((int(other), float(logprobs[other])) for other in top),
    )


def _fault(largest_logit: float) -> DrawnToken:
    problem = (
        f"the largest logit of a row is {largest_logit}: the forward went wrong or all is banned"
    )
    return DrawnToken(0, problem=problem, cause=ProblemCause.DEFECT)


@dataclass(frozen=True)
class ScoredLogits:
    """Logits of one forward by their use: `drawing` [N, vocab] fp32 is None where the model gave
    none."""

    drawing: Tensor | None
    scores: list[Scores]  # per row that scores, in row order


def wanted_tokens(batch: ForwardBatch) -> list[int]:
    """Indices of the tokens whose logits a batch needs, ascending: the scored ones of each row, and
    of each row that draws its last token, or all of them where they are a tree under
    verification."""
    wanted: list[int] = []
    for start, end, num_scored, draws in _spans(batch):
        wanted += range(start, start + num_scored)
        if draws:
            wanted += range(start, end) if batch.mode is ForwardMode.VERIFY else [end - 1]
    return wanted


def score(logits: Tensor | None, batch: ForwardBatch) -> ScoredLogits:
    """Take the scored rows out of `logits`, which has a row for each of `wanted_tokens(batch)`.

    Each token's values come from its own row of logits alone, in double precision, so they do not
    depend on the batch.

    Raises:
        InternalError: the model gave another number of rows.
    """
    if not batch.scoring:
        return ScoredLogits(logits, [])
    wanted = wanted_tokens(batch)
    if (0 if logits is None else logits.shape[0]) != len(wanted):
        raise InternalError(
            f"a batch wants {len(wanted)} rows of logits, the model gave "
            f"{0 if logits is None else logits.shape[0]}"
        )
    if logits is None:
        return ScoredLogits(None, [])
    drawing: list[int] = []
    scores: list[Scores] = []
    at = 0
    for row, (start, end, num_scored, draws) in enumerate(_spans(batch)):
        scoring = batch.scoring[row]
        if scoring is not None:
            scores.append(
                _scores(logits[at : at + num_scored], scoring.next_token_ids, scoring.num_top)
            )
        num_drawing = (end - start if batch.mode is ForwardMode.VERIFY else 1) if draws else 0
        drawing += range(at + num_scored, at + num_scored + num_drawing)
        at += num_scored + num_drawing
    return ScoredLogits(logits[torch.tensor(drawing, dtype=torch.long)], scores)


def _scores(logits: Tensor, token_ids: Sequence[int], num_top: int) -> Scores:
    rows = logits.detach().cpu().numpy()
    return tuple(
        DrawnToken(token_id, token_logprobs(row.astype(np.float64), token_id, num_top))
        for row, token_id in zip(rows, token_ids, strict=True)
    )


def _spans(batch: ForwardBatch) -> list[tuple[int, int, int, bool]]:
    """(first token, end, scored tokens, whether it draws) per row."""
    spans, start = [], 0
    scoring = batch.scoring or (None,) * batch.num_rows
    for length, sampling, scored in zip(batch.query_lens, batch.sampling, scoring, strict=True):
        num_scored = 0 if scored is None else len(scored.next_token_ids)
        spans.append((start, start + length, num_scored, sampling is not None and length > 0))
        start += length
    return spans
