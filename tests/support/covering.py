"""Points of a grid that is too large to try all of them."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, product

Point = tuple[object, ...]
Pair = tuple[int, object, int, object]  # a value of each of two factors


def pairs_of(point: Point) -> Iterator[Pair]:
    """Return all pairs of values of a point."""
    return ((i, a, j, b) for (i, a), (j, b) in combinations(enumerate(point), 2))


def all_pairs(factors: Sequence[Sequence[object]]) -> set[Pair]:
    return {
        (i, a, j, b)
        for (i, first), (j, second) in combinations(enumerate(factors), 2)
        for a, b in product(first, second)
    }


def covering(factors: Sequence[Sequence[object]], *, at_least: int) -> list[Point]:
    """Return points in which any two values of different factors occur together somewhere.

    More are added if these are too few. Each point is, of some random ones, the one with most new
    pairs; the result is always the same.
    """
    rng, missing, found = (
        random.Random(1),
        sorted(all_pairs(factors), key=repr),
        dict[Point, None](),
    )
    while missing or len(found) < at_least:
        candidates = [[rng.choice(factor) for factor in factors] for _ in range(40)]
        for candidate in candidates if missing else []:
            i, a, j, b = rng.choice(missing)
            candidate[i], candidate[j] = a, b
        still = set(missing)
        best = max(
            (tuple(each) for each in candidates),
            key=lambda each: sum(pair in still for pair in pairs_of(each)),
        )
        found[best] = None
        has = set(pairs_of(best))
        missing = [pair for pair in missing if pair not in has]
    return list(found)
