"""Tokens drawn from rows of logits on the host, as `engine.sampling.sampler` defines it, in double precision: one row
after the other, with memory of a thread's own.

Two things save most of the work. Each block of 64 logits has its highest one noted, so of all but a few blocks no more
is looked at where few tokens may be drawn. And nothing is sorted: the least weight that passes a filter is found by
halving, as bits of positive numbers are in the order of the numbers.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host import strided
from engine.kernels.host.compiled import (
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
from engine.kernels.host.strided import integers, size_of

NOT_HERE = -1  # in place of a token
Rule = tuple[float, float, float, float, float]
"""Temperature, top-k, top-p, min-p, and a random number from [0, 1)."""
RULE_FIELDS = 5
_DRAWS = record("num_rows", "vocab_size", "logits", "rules", "tokens")
_BLOCK = 64
_SUM_BLOCK = 512  # weights that are added up before the draw looks among them
_ONE_BITS = 0x3FF0000000000000
_EXPONENT_BIAS, _FRACTION_BITS = 1023, 52
_LOWEST = -708.0  # e^x counts as 0 below
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
# Taylor's terms: for |r| <= ln(2) / 2 the first one left out is below 1e-17.
_TERMS = tuple(1.0 / float(np.prod(np.arange(1.0, n + 1))) for n in range(14))
_T2, _T3, _T4, _T5, _T6, _T7, _T8, _T9, _T10, _T11, _T12, _T13 = _TERMS[2:]


def draw_tokens(logits: Tensor, rules: Sequence[Rule], team: Team) -> list[int]:
    """A token for each row of logits [R, vocab], fp32 or fp64, dense, by its rule; temperature 0 takes the first of the
    largest logits. NOT_HERE for a row without a largest finite logit, or with NaN."""
    (num_rows, vocab_size), table = logits.shape, torch.tensor(rules, dtype=torch.float64)
    tokens = torch.empty(num_rows, dtype=torch.int64)
    scratch_bytes = 8 * (2 * vocab_size + -(-vocab_size // _BLOCK))
    launch_integers(compiled_for(logits.dtype), num_rows, (
        num_rows, vocab_size, logits.data_ptr(), table.data_ptr(), tokens.data_ptr()), team,
        scratch_bytes=scratch_bytes)
    return tokens.tolist()


@cache
def compiled_for(dtype: torch.dtype):
    stored = np.float64 if dtype is torch.float64 else np.float32

    def work(pointer):
        _draw_rows(pointer, stored)

    return compile_kernel(work, _DRAWS, f"draw_tokens_{stored.__name__}", __file__, strided.__file__)


@njit(**PART)
def _draw_rows(pointer, stored):
    """One thread's part: a row at a time, until none is left."""
    a = carray(pointer, 1)[0]
    weights = take_seat(pointer)
    ids, marks = weights + 8 * a.vocab_size, weights + 16 * a.vocab_size
    tokens = integers(a.tokens)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        rule = carray(pointer_to(a.rules + item * RULE_FIELDS * 8, np.float64), RULE_FIELDS)
        logits = pointer_to(a.logits + item * a.vocab_size * size_of(stored), stored)
        tokens[item] = _draw(logits, a.vocab_size, rule, pointer_to(weights, np.float64), pointer_to(ids, np.int64),
                             pointer_to(marks, np.float64), stored)
        count_up(pointer, DONE)


@njit(**PART)
def _draw(logits, vocab_size, rule, weights, ids, marks, stored):
    """weights, ids: room for as many as there are tokens; marks: for one of each block."""
    temperature, top_k, top_p, min_p, point = rule[0], int(rule[1]), rule[2], rule[3], rule[4]
    num_blocks = (vocab_size + _BLOCK - 1) // _BLOCK
    best = _mark_blocks(logits, vocab_size, marks, stored)
    if not np.isfinite(best):
        return NOT_HERE
    if temperature == 0:
        return _first(logits, vocab_size, marks, best)
    for block in range(num_blocks):
        marks[block] = _exp((marks[block] - best) / temperature)
    count, mass, takes_all = vocab_size, 0.0, False
    if 0 < top_k < vocab_size:
        least = _least_of(marks, num_blocks, float(top_k), False) if top_k < num_blocks else 0.0  # noqa: FBT003
        count = _gather(logits, vocab_size, best, temperature, marks, least, weights, ids)
        count = _keep(weights, ids, count, _least_of(weights, count, float(top_k), False), top_k)  # noqa: FBT003
        mass = top_p * _sum(weights, 0, count)
    else:
        for place in range(vocab_size):
            weights[place] = _exp((logits[place] - best) / temperature)
        takes_all = top_p >= 1 and min_p <= 0
        if not takes_all:
            # What weighs less than this has all together no more than the share that top-p leaves out.
            mass = _sum(weights, 0, vocab_size)
            least = (1 - top_p) * mass / vocab_size * (1 - 1e-9) if top_p < 1 else min_p
            mass *= top_p
            count = _pick(weights, vocab_size, marks, least, ids)
    if top_p < 1 and _sum(weights, 0, count) > mass:
        least = _least_of(weights, count, mass, True)  # noqa: FBT003
        heavier = _sum_above(weights, count, least)
        num_equal = max(1, int(np.ceil((mass - heavier) / least)))
        count = _keep(weights, ids, count, least, _count_above(weights, count, least) + num_equal)
    if min_p > 0:
        count = _keep(weights, ids, count, min_p, count)
    place = _find(weights, count, point, marks)
    return place if takes_all else ids[place]


@njit(**PART)
def _mark_blocks(logits, vocab_size, marks, stored):
    """The highest logit of each block, of which the highest is returned; NaN where there is one."""
    best, is_number = -np.inf, True
    for block in range((vocab_size + _BLOCK - 1) // _BLOCK):
        first, highest = block * _BLOCK, stored(-np.inf)
        size, num_numbers = min(_BLOCK, vocab_size - first), 0
        for place in range(size):
            value = logits[first + place]
            highest = value if value > highest else highest
            num_numbers += value == value
        is_number = is_number and num_numbers == size
        marks[block] = highest
        best = max(best, float(highest))
    return best if is_number else np.nan


@njit(**PART)
def _first(logits, vocab_size, marks, best):
    block = 0
    while marks[block] != best:
        block += 1
    place = block * _BLOCK
    while logits[place] != best:
        place += 1
    return place


@njit(**PART)
def _exp(x):
    """e^x for x <= 0, in double precision."""
    inside = max(x, _LOWEST)
    exponent = np.floor(inside * _LOG2_E + 0.5)
    r = (inside - exponent * _LN2_HIGH) - exponent * _LN2_LOW
    tail = _T8 + r * (_T9 + r * (_T10 + r * (_T11 + r * (_T12 + r * _T13))))
    value = 1.0 + r * (1.0 + r * (_T2 + r * (_T3 + r * (_T4 + r * (_T5 + r * (_T6 + r * (_T7 + r * tail)))))))
    power = np.int64(np.int64(np.int32(exponent) + _EXPONENT_BIAS) << _FRACTION_BITS).view(np.float64)
    return value * power if x >= _LOWEST else 0.0


@njit(**PART)
def _gather(logits, vocab_size, best, temperature, marks, least, weights, ids):
    """Ids, ascending, and weights of the tokens that weigh `least` or more. Returns how many."""
    count = 0
    for block in range((vocab_size + _BLOCK - 1) // _BLOCK):
        if marks[block] >= least:
            for place in range(block * _BLOCK, min((block + 1) * _BLOCK, vocab_size)):
                weight = _exp((logits[place] - best) / temperature)
                if weight >= least:
                    weights[count], ids[count] = weight, place
                    count += 1
    return count


@njit(**PART)
def _pick(weights, vocab_size, marks, least, ids):
    """The same of weights that are there; they close up."""
    count = 0
    for block in range((vocab_size + _BLOCK - 1) // _BLOCK):
        if marks[block] >= least:
            for place in range(block * _BLOCK, min((block + 1) * _BLOCK, vocab_size)):
                if weights[place] >= least:
                    weights[count], ids[count] = weights[place], place
                    count += 1
    return count


@njit(**PART)
def _keep(weights, ids, count, least, limit):
    """Of weights with their ids those above `least`, and of those equal to it the first, `limit` together. Returns how
    many."""
    num_equal, kept = limit - _count_above(weights, count, least), 0
    for place in range(count):
        weight = weights[place]
        if weight > least or (weight == least and num_equal > 0):
            num_equal -= weight == least
            weights[kept], ids[kept] = weight, ids[place]
            kept += 1
    return kept


@njit(**PART)
def _least_of(weights, count, wanted, by_mass):
    """The highest weight for which those of it or more are `wanted`, or `by_mass` sum up to that; 0 if none is."""
    low, high = 0, _ONE_BITS  # as bits: low is enough, what is above high is not
    while low < high:
        middle = low + (high - low + 1) // 2
        least, found = np.int64(middle).view(np.float64), 0.0
        if by_mass:
            for place in range(count):
                found += weights[place] if weights[place] >= least else 0.0
        else:
            for place in range(count):
                found += 1.0 if weights[place] >= least else 0.0
        if found >= wanted:
            low = middle
        else:
            high = middle - 1
    return np.int64(low).view(np.float64)


@njit(**PART)
def _sum(weights, first, end):
    total = 0.0
    for place in range(first, end):
        total += weights[place]
    return total


@njit(**PART)
def _sum_above(weights, count, least):
    total = 0.0
    for place in range(count):
        total += weights[place] if weights[place] > least else 0.0
    return total


@njit(**PART)
def _count_above(weights, count, least):
    found = 0
    for place in range(count):
        found += weights[place] > least
    return found


@njit(**PART)
def _find(weights, count, point, sums):
    """The first place up to which more than that share of the weights lies. sums: room for one of each block."""
    num_blocks, total = (count + _SUM_BLOCK - 1) // _SUM_BLOCK, 0.0
    for block in range(num_blocks):
        sums[block] = _sum(weights, block * _SUM_BLOCK, min((block + 1) * _SUM_BLOCK, count))
        total += sums[block]
    target, before, last = point * total, 0.0, 0
    for block in range(num_blocks):
        if sums[block] > 0 and before + sums[block] > target:
            found = before
            for place in range(block * _SUM_BLOCK, min((block + 1) * _SUM_BLOCK, count)):
                if weights[place] > 0:
                    found, last = found + weights[place], place
                    if found > target:
                        break
            return last  # the block's sum may have been rounded up
        before += sums[block]
    return last
