"""From a row of logits to the distribution a token is drawn from. Pure numpy in double precision, one row at a time.

One row at a time makes the result independent of the batch; double precision keeps a running sum over 150,000
probabilities exact enough to invert. Legend: V the vocabulary, n tokens kept.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.batch import OutputRow, SamplingRow
from engine.core.request import SamplingParams

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]

_NUCLEUS_GUESS = 4096


class TokenCounts:
    """Which tokens occur in a request's prompt, and how often in its output. Moves with the output: a step costs what
    it changes, whatever the context's length. Keeps 5 bytes per token of the vocabulary, and the output."""

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        self._in_prompt = np.zeros(vocab_size, np.bool_)
        self._in_prompt[np.fromiter(prompt_token_ids, np.int64)] = True
        self._counts = np.zeros(vocab_size, np.int32)
        self._output: list[int] = []

    def move(self, kept: int, token_ids: Sequence[int]) -> None:
        """The output is its first `kept` tokens, then `token_ids`. Raises IndexError if it is shorter than that."""
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
    counts = TokenCounts(() if output.opening is None else output.opening.prompt_token_ids, vocab_size)
    counts.move(output.kept, output.token_ids)
    return counts


def changes_logits(row: SamplingRow) -> bool:
    """Whether the most likely token may differ from that of the raw logits."""
    return bool(row.banned_token_ids or row.params.logit_bias or row.params.needs_history)


def adjusted(logits: Floats, row: SamplingRow, counts: TokenCounts | None = None) -> Floats:
    """[V] logits after penalties, bias and bans, in this order; a copy. `counts` are those of the row's output; without
    them a row that opens its request is counted here.

    Repetition divides positive and multiplies negative logits of every token in prompt or output (Keskar et al.,
    2019); frequency is subtracted per occurrence in the output, presence once.
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


def filtered(logits: Floats, params: SamplingParams) -> tuple[Ids, Floats]:
    """Ids [n], ascending, and weights [n] of the tokens that may be drawn; the weights need not sum to 1.

    Temperature, then top-k, then top-p of what top-k left, then min-p; equal weights stay in the order of their ids,
    so exactly k tokens pass top-k. `params.temperature` is above 0 and the largest of `logits` finite.
    """
    with np.errstate(over="ignore"):  # a tiny temperature sends everything but the best to minus infinity
        weights = np.exp((logits - logits.max()) / params.temperature)
    ids = np.arange(len(weights), dtype=np.int64)
    if 0 < params.top_k < len(weights):
        ids = _highest(weights, params.top_k)
    if params.top_p < 1:
        ids = ids[_highest(weights[ids], _nucleus_size(weights[ids], params.top_p))]
    if params.min_p > 0:  # the largest weight is 1
        ids = ids[weights[ids] >= params.min_p]
    return ids, weights[ids]


def largest(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest values, largest first, equal ones by id."""
    ids = _highest(values, count)
    return ids[np.argsort(-values[ids], kind="stable")]


def _highest(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest values, ascending; of equal ones the lower ids. Finds a threshold, sorts nothing."""
    if count >= len(values):
        return np.arange(len(values), dtype=np.int64)
    if count < 1:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    kept = values > threshold
    equal = np.flatnonzero(values == threshold)
    kept[equal[: count - int(kept.sum())]] = True
    return np.flatnonzero(kept)


def _nucleus_size(weights: Floats, top_p: float) -> int:
    """How many of the largest weights it takes to hold a share of at least `top_p`; at least one."""
    mass, num_others = top_p * float(weights.sum()), len(weights) - _NUCLEUS_GUESS
    if num_others > 0:  # the usual nucleus is small; sort only what may be in it
        size = _reach(np.partition(weights, num_others)[num_others:], mass)
        if size <= _NUCLEUS_GUESS:
            return size
    return _reach(weights, mass)


def _reach(weights: Floats, mass: float) -> int:
    """How many of the weights, largest first, sum to `mass`; one more than there are if rounding keeps all below."""
    return int(np.searchsorted(np.cumsum(np.sort(weights)[::-1]), mass)) + 1
