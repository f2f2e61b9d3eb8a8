"""Draws from one row of logits by numpy: what the kernel of `engine.kernels.host.tokens.sampling`
is held against."""

import numpy as np
from numpy.typing import NDArray

from engine.core.request import SamplingParams
from engine.sampling.sampler import largest
from engine.sampling.uniform import uniform

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


def sample(logits: Floats, params: SamplingParams, position: int) -> int:
    """Sample a token of [vocab] logits, the largest of which is finite."""
    if params.temperature == 0:
        return int(logits.argmax())
    ids, weights = filtered(logits, params)
    return int(ids[_inverse(weights, uniform(params.seed, position))])


def filtered(logits: Floats, params: SamplingParams) -> tuple[Ids, Floats]:
    """Return ids [n], ascending, and weights [n] of the tokens that may be sampled; the weights
    need not sum to 1.

    Temperature, then top-k, then top-p of what top-k left, then min-p; equal weights stay in the
    order of their ids, so exactly k tokens pass top-k. `params.temperature` is above 0 and the
    largest of `logits` finite.
    """
    with np.errstate(
        over="ignore"
    ):  # a tiny temperature sends everything but the best to minus infinity
        weights = np.exp((logits - logits.max()) / params.temperature)
    ids = np.arange(len(weights), dtype=np.int64)
    if 0 < params.top_k < len(weights):
        ids = _highest(weights, params.top_k)
    if params.top_p < 1:
        ids = ids[_highest(weights[ids], _nucleus_size(weights[ids], params.top_p))]
    if params.min_p > 0:  # the largest weight is 1
        ids = ids[weights[ids] >= params.min_p]
    return ids, weights[ids]


def _highest(values: Floats, count: int) -> Ids:
    """Return ids of the `count` largest values, ascending; of equal ones the lower ids."""
    return np.sort(largest(values, count))


def _nucleus_size(weights: Floats, top_p: float) -> int:
    """Return how many of the largest weights hold a share of at least `top_p`; at least one."""
    return int(np.searchsorted(np.cumsum(np.sort(weights)[::-1]), top_p * float(weights.sum()))) + 1


def _inverse(weights: Floats, point: float) -> int:
    """Return the first index whose cumulative share exceeds `point`.

    The largest weight is 1 and `point` at most 1 - 2**-53, so the product below stays under the
    total when rounded, and the index found has weight.
    """
    sums = weights.cumsum()
    return int(sums.searchsorted(point * sums[-1], side="right"))
