"""Sampling: from logits to tokens and their log-probabilities.

Each row gives one token. Sampling is pure: the same logits and the same row give the same token in
any batch. It computes one row at a time in double precision. Working by row makes the result
independent of the batch. Double precision keeps the running sum over 150,000 probabilities exact
enough to invert it.

The random number depends only on (seed, position). So sampling at a node of a draft tree is the
same call, with the logits and the row of that node. The walk over the tree emits exactly the tokens
of plain decoding.

Known tokens, such as those of a prompt, are scored, and their results have the same form as those
of sampled tokens. If a row both scores and samples, its scored logits come first. The logits of a
row are therefore in the order of its tokens.
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
from engine.core.request import ProblemCause, SampledToken, TokenLogprobs
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.tokens.row_ops import largest_of_rows
from engine.kernels.host.tokens.sampling import NOT_HERE, sample_tokens
from engine.sampling.uniform import uniform
from runtime.errors import InternalError

Floats = NDArray[np.float64]
TokenIds = NDArray[np.int64]
Mask = NDArray[np.bool_]
Scores = tuple[SampledToken, ...]

_TEAM = Team()
_CHANGED_TOGETHER = 16  # rows: one copy of 150,000 logits in double precision takes 1.2 MB


class TokenCounts:
    """The set of tokens in a request's prompt and output, with their counts in the output.

    It is updated by the changes of the output, so the cost of a step does not depend on the context
    length. It takes 5 bytes per token of the vocabulary, plus the output.
    """

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        self._in_prompt = np.zeros(vocab_size, np.bool_)
        self._in_prompt[np.fromiter(prompt_token_ids, np.int64)] = True
        self._counts = np.zeros(vocab_size, np.int32)
        self._output: list[int] = []

    def move(self, kept: int, token_ids: Sequence[int]) -> None:
        """Cut the output to its first `kept` tokens and append `token_ids`.

        Raises:
            IndexError: the output has fewer than `kept` tokens.
        """
        if kept > len(self._output):
            raise IndexError(f"{kept} tokens are to be kept, {len(self._output)} are known")
        np.subtract.at(self._counts, np.fromiter(self._output[kept:], np.int64), 1)
        del self._output[kept:]
        self._output += token_ids
        np.add.at(self._counts, np.fromiter(token_ids, np.int64), 1)

    @property
    def seen(self) -> TokenIds:
        """Return the tokens of prompt and output, [n] ascending."""
        return np.flatnonzero(self._in_prompt | (self._counts > 0)).astype(np.int64)

    @property
    def output(self) -> tuple[TokenIds, TokenIds]:
        """Return the tokens of the output, [n] ascending, and their counts, [n]."""
        ids = np.flatnonzero(self._counts).astype(np.int64)
        return ids, self._counts[ids].astype(np.int64)


def counts_of(output: OutputRow, vocab_size: int) -> TokenCounts:
    """Return the counts of a row that opens its request."""
    counts = TokenCounts(
        () if output.opening is None else output.opening.prompt_token_ids, vocab_size
    )
    counts.move(output.kept, output.token_ids)
    return counts


def changes_logits(row: SamplingRow) -> bool:
    """Return whether the most likely token may differ from the one of the raw logits."""
    return bool(row.banned_token_ids or row.params.logit_bias or row.params.needs_history)


def adjusted(logits: Floats, row: SamplingRow, counts: TokenCounts | None = None) -> Floats:
    """Return a copy of the logits [V] after penalties, bias and bans, in this order.

    `counts` belongs to the row's output. Without it, the output of a row that opens its request is
    counted here. The repetition penalty divides positive logits and multiplies negative ones, for
    every token of prompt or output (Keskar et al., 2019). The frequency penalty is subtracted per
    occurrence in the output, the presence penalty once.
    """
    params = row.params
    result = logits.copy()
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


def largest(values: Floats, count: int) -> TokenIds:
    """Return the ids of the `count` largest values, largest first; equal values by id."""
    ids = _highest(values, count)
    return ids[np.argsort(-values[ids], kind="stable")]


def _highest(values: Floats, count: int) -> TokenIds:
    """Return the ids of the `count` largest values, ascending; of equal values, the lower ids.

    It selects by a threshold and does not sort.
    """
    if count >= len(values):
        return np.arange(len(values), dtype=np.int64)
    if count < 1:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    kept = values > threshold
    equal = np.flatnonzero(values == threshold)
    kept[equal[: count - int(kept.sum())]] = True
    return np.flatnonzero(kept)


Sampler = Callable[[Tensor, Sequence[SamplingRow]], list[SampledToken]]


class RequestSampler(Protocol):
    """A `Sampler` with state per request, from its first row until a batch names it as ended."""

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]: ...

    def prepare(self, batch: ForwardBatch) -> None:
        """Start the work that does not need the logits, before the batch's forward."""
        ...

    def forced(self, row: SamplingRow, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the only tokens that may follow `token_ids`, which were just sampled from the row on.

        They are those that are known without further work; there may be more, or none.
        """
        ...

    def reset(self) -> None:
        """Drop the state of every request."""
        ...


def sample(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    allowed: Sequence[Mask | None] = (),
    counts: Sequence[TokenCounts | None] = (),
) -> list[SampledToken]:
    """Sample one token per row.

    `logits` is [R, vocab] fp32, `rows` its R rows. `allowed`, if given, has per row None or [vocab]
    bool, the tokens that may be sampled. `counts` has per row the counts for its penalties, or None
    if the row opens its request.

    Temperature 0 takes the largest logit, and of equal logits the lowest id. Any other temperature
    inverts the cumulative distribution, in the order of token ids, at `uniform(seed, position)`.
    Filters apply in this order: top-k at that temperature, top-p of the rest, min-p. Equal weights
    are ordered by id, so exactly k tokens pass top-k.

    A row without a finite largest logit (NaN, infinity, or every token banned) gets token 0 with a
    problem whose cause is a defect. Only this row ends.

    Raises:
        InternalError: `rows` does not fit `logits`.
    """
    if len(rows) != logits.shape[0]:
        raise InternalError(f"{logits.shape[0]} rows of logits came with {len(rows)} sampling rows")
    if not rows:
        return []
    if not allowed and all(takes_maximum(row) for row in rows):
        return _raw_maxima(logits)
    # One copy to the host: filters and the random number then run there for every device, so all
    # devices sample the same tokens from the same logits.
    host = logits.detach().cpu().contiguous()
    masks = allowed or [None] * len(rows)
    known = counts or [None] * len(rows)
    changed = [
        index for index, row in enumerate(rows) if changes_logits(row) or masks[index] is not None
    ]
    if not changed:
        return _sampled(host, rows, host)
    raw = sorted({*range(len(rows))} - {*changed})
    of_raw = host[raw]
    tokens = dict(zip(raw, _sampled(of_raw, [rows[index] for index in raw], of_raw), strict=True))
    for first in range(0, len(changed), _CHANGED_TOGETHER):
        some = changed[first : first + _CHANGED_TOGETHER]
        finals = np.stack(
            [_changed(host[index], rows[index], masks[index], known[index]) for index in some]
        )
        tokens |= zip(
            some,
            _sampled(torch.from_numpy(finals), [rows[index] for index in some], host[some]),
            strict=True,
        )
    return [tokens[index] for index in range(len(rows))]


def _changed(
    logits: Tensor, row: SamplingRow, allowed: Mask | None, counts: TokenCounts | None
) -> Floats:
    final = adjusted(logits.numpy().astype(np.float64), row, counts)
    return final if allowed is None else np.where(allowed, final, -np.inf)


def _sampled(final: Tensor, rows: Sequence[SamplingRow], logits: Tensor) -> list[SampledToken]:
    """Sample from `final` [R, vocab], fp32 or fp64; `logits` has the raw values."""
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
        zip(sample_tokens(final, rules, _TEAM), rows, strict=True)
    ):
        if token_id == NOT_HERE:
            tokens.append(_fault(final[index].max().item()))  # NaN counts as largest
        elif row.num_top_logprobs is None:
            tokens.append(SampledToken(token_id))
        else:
            raw = logits[index].numpy().astype(np.float64)
            tokens.append(
                SampledToken(token_id, token_logprobs(raw, token_id, row.num_top_logprobs))
            )
    return tokens


def takes_maximum(row: SamplingRow) -> bool:
    """Return whether the token is the largest raw logit and nothing else is returned.

    Grammars are not considered.
    """
    return row.params.temperature == 0 and row.num_top_logprobs is None and not changes_logits(row)


def _raw_maxima(logits: Tensor) -> list[SampledToken]:
    """Return the largest token of each row; of equal logits the first.

    All rows are computed at once on their device, with one copy to the host. NaN counts as largest.
    """
    if logits.device == HOST and logits.dtype is torch.float32 and logits.is_contiguous():
        ids = largest_of_rows(logits, _TEAM)
        largest_values = logits.numpy()[np.arange(len(ids)), ids.numpy()].tolist()
        token_ids = ids.tolist()
    else:
        values, ids = logits.max(dim=-1)
        largest_values, token_ids = torch.stack([values.double(), ids.double()]).tolist()
    return [
        SampledToken(int(token_id)) if math.isfinite(value) else _fault(value)
        for value, token_id in zip(largest_values, token_ids, strict=True)
    ]


def token_logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log-probability of a token and of the `num_top` most likely tokens.

    `logits` is one row, [vocab].
    """
    peak = logits.max()
    logprobs = logits - (peak + np.log(np.exp(logits - peak).sum()))
    top = largest(logprobs, num_top)
    return TokenLogprobs(
        logprob=float(logprobs[token_id]),
        top=tuple((int(other), float(logprobs[other])) for other in top),
    )


def _fault(largest_logit: float) -> SampledToken:
    problem = f"the largest logit of a row is {largest_logit}: the forward failed or every token is banned"
    return SampledToken(0, problem=problem, cause=ProblemCause.DEFECT)


@dataclass(frozen=True)
class ScoredLogits:
    """The logits of one forward, split by their use.

    `sampled` is [N, vocab] fp32, or None if the model returned no logits.
    """

    sampled: Tensor | None
    scores: list[Scores]  # per scoring row, in row order


def wanted_by_row(batch: ForwardBatch) -> list[list[int]]:
    """Return per row the indices of the tokens whose logits a batch needs, ascending.

    These are the scored tokens of each row, and the last token of each row that samples. A row with
    a tree under verification needs all of its tokens.
    """
    wanted: list[list[int]] = []
    for start, end, num_scored, samples in _spans(batch):
        wanted.append([*range(start, start + num_scored)])
        if samples:
            wanted[-1] += range(start, end) if batch.mode is ForwardMode.VERIFY else [end - 1]
    return wanted


def wanted_tokens(batch: ForwardBatch) -> list[int]:
    """Return the indices of `wanted_by_row` of all rows."""
    return [token for tokens in wanted_by_row(batch) for token in tokens]


def score(logits: Tensor | None, batch: ForwardBatch) -> ScoredLogits:
    """Split the scored rows off `logits`, which has one row per `wanted_tokens(batch)`.

    The values of a token come only from its own row of logits, in double precision, so they do not
    depend on the batch.

    Raises:
        InternalError: the model returned another number of rows.
    """
    if not batch.scoring:
        return ScoredLogits(logits, [])
    wanted = wanted_tokens(batch)
    if (0 if logits is None else logits.shape[0]) != len(wanted):
        raise InternalError(
            f"a batch wants {len(wanted)} rows of logits, the model returned "
            f"{0 if logits is None else logits.shape[0]}"
        )
    if logits is None:
        return ScoredLogits(None, [])
    sampled: list[int] = []
    scores: list[Scores] = []
    at = 0
    for row, (start, end, num_scored, samples) in enumerate(_spans(batch)):
        scoring = batch.scoring[row]
        if scoring is not None:
            scores.append(
                _scores(logits[at : at + num_scored], scoring.next_token_ids, scoring.num_top)
            )
        num_sampled = (end - start if batch.mode is ForwardMode.VERIFY else 1) if samples else 0
        sampled += range(at + num_scored, at + num_scored + num_sampled)
        at += num_scored + num_sampled
    return ScoredLogits(logits[torch.tensor(sampled, dtype=torch.long)], scores)


def _scores(logits: Tensor, token_ids: Sequence[int], num_top: int) -> Scores:
    rows = logits.detach().cpu().numpy()
    return tuple(
        SampledToken(token_id, token_logprobs(row.astype(np.float64), token_id, num_top))
        for row, token_id in zip(rows, token_ids, strict=True)
    )


def _spans(batch: ForwardBatch) -> list[tuple[int, int, int, bool]]:
    """Return per row (first token, end, number of scored tokens, whether it samples)."""
    spans = []
    start = 0
    scoring = batch.scoring or (None,) * batch.num_rows
    for length, sampling, scored in zip(batch.query_lens, batch.sampling, scoring, strict=True):
        num_scored = 0 if scored is None else len(scored.next_token_ids)
        spans.append((start, start + length, num_scored, sampling is not None and length > 0))
        start += length
    return spans
