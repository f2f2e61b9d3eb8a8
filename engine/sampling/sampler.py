"""Draws one token per row of logits. Pure: the same logits and the same row give the same token, in any batch.

Because the random number depends on (seed, position) alone, drawing at a node of a draft tree is the same call with
that node's logits and row: the walk over the tree emits exactly what plain decoding would.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import ForwardBatch, SamplingRow
from engine.core.request import DrawnToken, TokenLogprobs
from engine.sampling.processors import Floats, Mask, TokenCounts, adjusted, changes_logits, filtered, largest
from engine.sampling.uniform import uniform
from runtime.errors import InternalError

Sampler = Callable[[Tensor, Sequence[SamplingRow]], list[DrawnToken]]


class RequestSampler(Protocol):
    """A `Sampler` that keeps what it knows of requests, from their first row to the end that a batch names."""

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[DrawnToken]: ...

    def prepare(self, batch: ForwardBatch) -> None:
        """Before the batch's forward, what can be done without its logits."""
        ...

    def reset(self) -> None:
        """Forget every request."""
        ...


def sample(logits: Tensor, rows: Sequence[SamplingRow], allowed: Sequence[Mask | None] = (),
           counts: Sequence[TokenCounts | None] = ()) -> list[DrawnToken]:
    """One token per row. logits: [R, vocab] fp32, `rows` its R rows. If given, `allowed` has for each row None or
    [vocab] bool, tokens that may be drawn; `counts` what its penalties count, or None for a row that brings it all.

    Temperature 0 takes the largest logit (the lowest id among equals); otherwise the inverse of the cumulative
    distribution, in the order of token ids, at `uniform(seed, position)`. A row without a largest finite logit (NaN,
    infinity, or every token banned) gets token 0 with a problem that is a fault; it ends alone.

    Raises:
        InternalError: `rows` does not fit `logits`.
    """
    if len(rows) != logits.shape[0]:
        raise InternalError(f"{logits.shape[0]} rows of logits came with {len(rows)} sampling rows")
    if not rows:
        return []
    if not allowed and all(_takes_raw_maximum(row) for row in rows):
        return _raw_maxima(logits)
    # In one copy: filters and the random number then run as on any other device, so every device draws alike from the
    # same logits.
    host = logits.detach().cpu().numpy()
    return [draw(host[index].astype(np.float64), row, allowed[index] if allowed else None,
                 counts[index] if counts else None) for index, row in enumerate(rows)]


def draw(logits: Floats, row: SamplingRow, allowed: Mask | None = None,
         counts: TokenCounts | None = None) -> DrawnToken:
    """One token from one row of logits, [vocab] in double precision, as in `sample`."""
    final = adjusted(logits, row, counts) if changes_logits(row) else logits
    if allowed is not None:
        final = np.where(allowed, final, -np.inf)
    best = int(final.argmax())  # NaN counts as largest
    if not np.isfinite(final[best]):
        return _fault(float(final[best]))
    if row.params.temperature == 0:
        token_id = best
    else:
        ids, weights = filtered(final, row.params)
        token_id = int(ids[_inverse(weights, uniform(row.params.seed, row.position))])
    if row.num_top_logprobs is None:
        return DrawnToken(token_id)
    return DrawnToken(token_id, token_logprobs(logits, token_id, row.num_top_logprobs))


def _takes_raw_maximum(row: SamplingRow) -> bool:
    return row.params.temperature == 0 and row.num_top_logprobs is None and not changes_logits(row)


def _raw_maxima(logits: Tensor) -> list[DrawnToken]:
    """All rows at once, where they are; one trip to the host."""
    values, ids = logits.max(dim=-1)  # the first of equals; NaN counts as largest
    largest_values, token_ids = torch.stack([values.double(), ids.double()]).tolist()
    return [DrawnToken(int(token_id)) if math.isfinite(value) else _fault(value)
            for value, token_id in zip(largest_values, token_ids, strict=True)]


def _inverse(weights: Floats, point: float) -> int:
    """The first index whose cumulative share exceeds `point`.

    The largest weight is 1 and `point` at most 1 - 2**-53, so the product below stays under the total when rounded,
    and the index found has weight.
    """
    sums = weights.cumsum()
    return int(sums.searchsorted(point * sums[-1], side="right"))


def token_logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """What one row of logits [vocab] says of a token, and of the `num_top` most likely ones."""
    peak = logits.max()
    logprobs = logits - (peak + np.log(np.exp(logits - peak).sum()))
    top = largest(logprobs, num_top)
    return TokenLogprobs(
        logprob=float(logprobs[token_id]),
        top=tuple((int(other), float(logprobs[other])) for other in top),
    )


def _fault(largest_logit: float) -> DrawnToken:
    problem = f"the largest logit of a row is {largest_logit}: the forward went wrong or all is banned"
    return DrawnToken(0, problem=problem, is_fault=True)
