"""Sampling of tokens from rows of logits on the host, in double precision.

The rules are those of `engine.sampling.sampler`. A thread processes one row after the other in its
own memory. Two techniques save most of the work. The maximum of each block of 64 logits is
recorded, so most blocks are skipped if few tokens can be sampled. Nothing is sorted: the least
weight that passes a filter is found by bisection, because the bits of positive numbers are in the
order of the numbers.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    PART,
    Team,
    compile_kernel,
    count_up,
    launch_integers,
    pointer_to,
    record,
    take_seat,
)
from engine.kernels.host.codegen.strided_loops import floats, integers

NOT_HERE = -1  # in place of a token
Rule = tuple[float, float, float, float, float]
"""Temperature, top-k, top-p, min-p, and a random number from [0, 1)."""
RULE_FIELDS = 5
_SAMPLES = record("num_rows", "vocab_size", "itemsize", "logits", "rules", "tokens")
_BLOCK = 64
# number of weights that are summed before the sampled token is searched among them
_SUM_BLOCK = 512
_ONE_BITS = 0x3FF0000000000000
_EXPONENT_BIAS = 1023
_FRACTION_BITS = 52
_FP32_BYTES = 4
# Steps of `_weighed`. A search is compiled at each call site, so there is only one (2.8 s; three
# took 5 s).
_BLOCKS, _TOP_K, _TOP_P, _MIN_P = range(4)
_LOWEST = -708.0  # e^x counts as 0 below
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10
# Taylor coefficients: for |r| <= ln(2) / 2 the first omitted term is below 1e-17.
_T2, _T3, _T4, _T5, _T6, _T7, _T8, _T9, _T10, _T11, _T12, _T13 = (
    1.0 / math.factorial(n) for n in range(2, 14)
)


def sample_tokens(logits: Tensor, rules: Sequence[Rule], team: Team) -> list[int]:
    """Sample a token for each row of logits [R, vocab], fp32 or fp64, dense, by its rule.

    Temperature 0 selects the first of the largest logits. The result is NOT_HERE for a row with NaN
    or without a finite maximum.
    """
    (num_rows, vocab_size), table = logits.shape, torch.tensor(rules, dtype=torch.float64)
    tokens = torch.empty(num_rows, dtype=torch.int64)
    scratch_bytes = 8 * (3 * vocab_size + -(-vocab_size // _BLOCK))
    launch_integers(
        compiled(),
        num_rows,
        (
            num_rows,
            vocab_size,
            logits.itemsize,
            logits.data_ptr(),
            table.data_ptr(),
            tokens.data_ptr(),
        ),
        team,
        scratch_bytes=scratch_bytes,
    )
    return tokens.tolist()


@cache
def compiled():
    def work(pointer):
        _sample_rows(pointer)

    return compile_kernel(work, _SAMPLES, "sample_tokens")


@njit(**PART)
def _sample_rows(pointer):
    """Run one thread: sample one row at a time until no items are left."""
    a = carray(pointer, 1)[0]
    room = take_seat(pointer)
    weights = pointer_to(room, np.float64)
    logits = pointer_to(room + 8 * a.vocab_size, np.float64)
    ids = integers(room + 16 * a.vocab_size)
    marks = pointer_to(room + 24 * a.vocab_size, np.float64)
    tokens = integers(a.tokens)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        given = a.logits + item * a.vocab_size * a.itemsize
        if a.itemsize == _FP32_BYTES:
            _copy(floats(given), logits, a.vocab_size)
        else:
            _copy(pointer_to(given, np.float64), logits, a.vocab_size)
        rule = carray(pointer_to(a.rules + item * RULE_FIELDS * 8, np.float64), RULE_FIELDS)
        tokens[item] = _sample(logits, a.vocab_size, rule, weights, ids, marks)
        count_up(pointer, DONE)


@njit(**PART)
def _copy(given, logits, vocab_size):
    for place in range(vocab_size):
        logits[place] = given[place]


@njit(**PART)
def _sample(logits, vocab_size, rule, weights, ids, marks):
    """Sample one row.

    weights and ids have space for one entry per token, marks for one per block.
    """
    temperature = rule[0]
    top_k = int(rule[1])
    top_p = rule[2]
    min_p = rule[3]
    point = rule[4]
    best = _mark_blocks(logits, vocab_size, marks)
    if not np.isfinite(best):
        return NOT_HERE
    if temperature == 0:
        return _first(logits, marks, best)
    for block in range((vocab_size + _BLOCK - 1) // _BLOCK):
        marks[block] = _exp((marks[block] - best) / temperature)
    top_k = top_k if top_k < vocab_size else 0
    takes_all = not top_k and top_p >= 1 and min_p <= 0
    count = _weighed(
        logits, vocab_size, best, temperature, top_k, top_p, min_p, takes_all, weights, ids, marks
    )
    place = _find(weights, count, point, marks)
    return place if takes_all else ids[place]


@njit(**PART)
def _weighed(
    logits, vocab_size, best, temperature, top_k, top_p, min_p, takes_all, weights, ids, marks
):
    """Compute the weights of the tokens that can be sampled; return their number.

    Their ids are stored as well, unless all tokens can be sampled.
    """
    count = vocab_size
    mass = 0.0
    least = 0.0
    above = 0.0
    for step in range(_BLOCKS, _BLOCKS + 1 if takes_all else _MIN_P + 1):
        if _searches(step, top_k, top_p, vocab_size):
            numbers, size = (
                (marks, (vocab_size + _BLOCK - 1) // _BLOCK)
                if step == _BLOCKS
                else (weights, count)
            )
            wanted, by_mass = (mass, 1.0) if step == _TOP_P else (float(top_k), 0.0)
            least, above = _least_of(numbers, size, wanted, by_mass)
        elif step == _MIN_P:
            least = min_p
        elif step != _BLOCKS:
            continue
        if step != _BLOCKS:
            count = _keep(
                weights, ids, count, least, _num_equal(step, count, top_k, mass, least, above)
            )
            mass = top_p * _sum(weights, 0, count)  # of the tokens that top-k left
            continue
        _weigh(logits, vocab_size, best, temperature, marks, least, weights)
        if not top_k:
            mass = _sum(weights, 0, vocab_size)
            least = _least_in_sight(mass, top_p, min_p, vocab_size)
            mass = top_p * mass
        if not takes_all:
            count = _pick(weights, vocab_size, marks, least, ids)
    return count


@njit(**PART)
def _searches(step, top_k, top_p, vocab_size):
    """Return whether the least weight of a filter must be searched.

    Top-k passes no token outside the top_k best blocks, if there are more blocks.
    """
    if step == _BLOCKS:
        return 0 < top_k < (vocab_size + _BLOCK - 1) // _BLOCK
    return (step == _TOP_K and top_k > 0) or (step == _TOP_P and top_p < 1)


@njit(**PART)
def _least_in_sight(total, top_p, min_p, vocab_size):
    """Return a bound below which no token is sampled.

    All tokens below it together have at most the share that top-p removes.
    """
    return (1 - top_p) * total / vocab_size * (1 - 1e-9) if top_p < 1 else min_p


@njit(**PART)
def _num_equal(step, count, top_k, mass, least, above):
    """Return how many tokens of the least weight pass, in addition to those above it."""
    if step == _TOP_K:
        return top_k - int(above)
    if step == _TOP_P and least > 0:
        return max(1, int(np.ceil((mass - above) / least)))
    return count


@njit(**PART)
def _mark_blocks(logits, vocab_size, marks):
    """Store the maximum logit of each block; return the maximum, or NaN if any logit is NaN."""
    best = -np.inf
    is_number = True
    for block in range((vocab_size + _BLOCK - 1) // _BLOCK):
        first = block * _BLOCK
        highest = -np.inf
        size = min(_BLOCK, vocab_size - first)
        num_numbers = 0
        for place in range(size):
            value = logits[first + place]
            highest = value if value > highest else highest
            num_numbers += value == value
        is_number = is_number and num_numbers == size
        marks[block] = highest
        best = max(best, highest)
    return best if is_number else np.nan


@njit(**PART)
def _first(logits, marks, best):
    block = 0
    while marks[block] != best:
        block += 1
    place = block * _BLOCK
    while logits[place] != best:
        place += 1
    return place


@njit(**PART)
def _exp(x):
    """Return e^x for x <= 0 in double precision."""
    inside = max(x, _LOWEST)
    exponent = np.floor(inside * _LOG2_E + 0.5)
    r = (inside - exponent * _LN2_HIGH) - exponent * _LN2_LOW
    tail = _T8 + r * (_T9 + r * (_T10 + r * (_T11 + r * (_T12 + r * _T13))))
    value = 1.0 + r * (
        1.0 + r * (_T2 + r * (_T3 + r * (_T4 + r * (_T5 + r * (_T6 + r * (_T7 + r * tail))))))
    )
    power = np.int64(np.int64(np.int32(exponent) + _EXPONENT_BIAS) << _FRACTION_BITS).view(
        np.float64
    )
    return value * power if x >= _LOWEST else 0.0


@njit(**PART)
def _weigh(logits, vocab_size, best, temperature, marks, least, weights):
    """Compute weights relative to the best, in all blocks that have a weight of `least` or more."""
    for block in range((vocab_size + _BLOCK - 1) // _BLOCK):
        if marks[block] >= least:
            for place in range(block * _BLOCK, min((block + 1) * _BLOCK, vocab_size)):
                weights[place] = _exp((logits[place] - best) / temperature)


@njit(**PART)
def _pick(weights, vocab_size, marks, least, ids):
    """Compact the weights of `least` or more, with their ids, ascending; return their number."""
    count = 0
    for block in range((vocab_size + _BLOCK - 1) // _BLOCK):
        if marks[block] >= least:
            for place in range(block * _BLOCK, min((block + 1) * _BLOCK, vocab_size)):
                if weights[place] >= least:
                    weights[count] = weights[place]
                    ids[count] = place
                    count += 1
    return count


@njit(**PART)
def _keep(weights, ids, count, least, num_equal):
    """Keep the weights above `least` and the first `num_equal` equal to it; return the number."""
    kept = 0
    for place in range(count):
        weight = weights[place]
        if weight > least or (weight == least and num_equal > 0):
            num_equal -= weight == least
            weights[kept] = weight
            ids[kept] = ids[place]
            kept += 1
    return kept


@njit(**PART)
def _least_of(weights, count, wanted, by_mass):
    """Return the least weight that passes, and the amount above it.

    It is the highest weight such that the weights at or above it reach `wanted`, or 0. With
    `by_mass` 1.0 `wanted` is a sum of weights, with 0.0 a number.
    """
    # as bits; low always satisfies the condition, and values above high do not
    low = 0
    high = _ONE_BITS
    while low < high:
        middle = low + (high - low + 1) // 2
        if _amount_above(weights, count, np.int64(middle - 1).view(np.float64), by_mass) >= wanted:
            low = middle
        else:
            high = middle - 1
    least = np.int64(low).view(np.float64)
    return least, _amount_above(weights, count, least, by_mass)


@njit(**PART)
def _amount_above(weights, count, bound, by_mass):
    total = 0.0
    by_number = 1.0 - by_mass
    for place in range(count):
        weight = weights[place]
        total += by_number + by_mass * weight if weight > bound else 0.0
    return total


@njit(**PART)
def _sum(weights, first, end):
    total = 0.0
    for place in range(first, end):
        total += weights[place]
    return total


@njit(**PART)
def _find(weights, count, point, sums):
    """Return the first place up to which the weights exceed the share `point`.

    sums has space for one entry per block.
    """
    num_blocks = (count + _SUM_BLOCK - 1) // _SUM_BLOCK
    total = 0.0
    for block in range(num_blocks):
        sums[block] = _sum(weights, block * _SUM_BLOCK, min((block + 1) * _SUM_BLOCK, count))
        total += sums[block]
    target = point * total
    before = 0.0
    last = 0
    for block in range(num_blocks):
        if sums[block] > 0 and before + sums[block] > target:
            found = before
            for place in range(block * _SUM_BLOCK, min((block + 1) * _SUM_BLOCK, count)):
                if weights[place] > 0:
                    found = found + weights[place]
                    last = place
                    if found > target:
                        break
            return last  # the block's sum may have been rounded up
        before += sums[block]
    return last
