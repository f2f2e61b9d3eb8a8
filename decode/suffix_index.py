"""The earlier occurrences of a request's last tokens, in its prompt and output.

The positions at which the same n-gram ends form a list, newest first. Its head is in a table under
the n-gram's hash, as in a compressor of the LZ77 family (Deutsch 1996, RFC 1951). A search visits a
bounded number of positions, so no text makes it slow. Tokens are compared, so a collision of hashes
costs a visit and finds nothing wrong.

Memory per token: 4 bytes per order in a list, 4 to 8 in a table, and a reference of 8.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ORDERS = (4, 2)  # lengths of the n-grams, in the order in which they are searched
MAX_MATCH = 16  # tokens that are compared; longer matches are alike
MAX_VISITS = 12  # positions of a list that are compared
MAX_ALIKE = 4  # of them with a match of `MAX_MATCH`; more would give the same tokens
NOWHERE = -1
MIN_TABLE_BITS = 8
# More tokens than that are added at once by numpy.
MAX_SINGLE_TOKENS = 64
_FACTOR = 0x9E3779B97F4A7C15  # odd; 2^64 / golden ratio (Knuth, TAOCP volume 3, section 6.4)
_BITS = 64
_MASK = (1 << _BITS) - 1


@dataclass(frozen=True)
class Occurrences:
    """Earlier positions whose preceding tokens match the newest ones best.

    `ends` are the indices of the tokens before which the match ends, newest first: at each of them
    is a token that may come next. `length` is the number of matching tokens, at most `MAX_MATCH`.
    """

    ends: tuple[int, ...] = ()
    length: int = 0


NO_OCCURRENCES = Occurrences()


@dataclass
class SuffixIndex:
    """An index of the tokens that were added. Belongs to the engine thread."""

    tokens: list[int] = field(default_factory=list)
    _bits: int = MIN_TABLE_BITS
    # by order: the newest position of each hash, and for each position the next older one
    _newest: "dict[int, array[int]]" = field(default_factory=dict)
    _older: "dict[int, array[int]]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rebuild()

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self.tokens += tokens
        if len(tokens) > MAX_SINGLE_TOKENS or len(self.tokens) > 1 << self._bits:
            self._rebuild()
            return
        for last in range(len(self.tokens) - len(tokens), len(self.tokens)):
            for order in ORDERS:
                self._add(order, last)

    def find(self) -> Occurrences:
        """Return the earlier occurrences of the newest tokens: those of the longest match."""
        for order in ORDERS:
            ends, longest = self._search(order)
            if ends:
                return Occurrences(tuple(ends), longest)
        return NO_OCCURRENCES

    def _search(self, order: int) -> tuple[list[int], int]:
        """Return the ends of the longest match of at least `order` tokens, and its length."""
        last = len(self.tokens) - 1
        ends: list[int] = []
        longest = order
        if last < order:
            return ends, longest
        older = self._older[order]
        at = older[last]
        tokens = self.tokens
        newest = tokens[max(0, last + 1 - MAX_MATCH) :]
        for _ in range(MAX_VISITS):
            if at == NOWHERE or (len(ends) == MAX_ALIKE and longest == MAX_MATCH):
                break
            # A shorter match differs in the first token of the longest one.
            if at + 1 >= longest and tokens[at + 1 - longest] == newest[-longest]:
                length = self._matching(at, newest)
                if length > longest:
                    ends.clear()
                    longest = length
                if length == longest:
                    ends.append(at + 1)
            at = older[at]
        return ends, longest

    def following(self, end: int, depth: int) -> int:
        """Return the token at `depth` after an occurrence.

        Beyond the newest token the text is assumed to repeat.
        """
        return self.tokens[end + depth % (len(self.tokens) - end)]

    def _matching(self, at: int, newest: list[int]) -> int:
        """Return how many tokens up to `at` equal the newest ones."""
        tokens = self.tokens
        if tokens[max(0, at + 1 - len(newest)) : at + 1] == newest:
            return len(newest)
        length = 0
        limit = min(len(newest), at + 1)
        while length < limit and tokens[at - length] == newest[-1 - length]:
            length += 1
        return length

    def _add(self, order: int, last: int) -> None:
        """Add the n-gram that ends with the token at `last`, the first without a place."""
        if last + 1 < order:
            self._older[order].append(NOWHERE)
            return
        key = 0
        for token in self.tokens[last + 1 - order : last + 1]:
            key = (key + token) * _FACTOR
        place = (key & _MASK) >> (_BITS - self._bits)
        newest = self._newest[order]
        self._older[order].append(newest[place])
        newest[place] = last

    def _rebuild(self) -> None:
        """Index all tokens, in tables with a place for twice their number."""
        self._bits = max(MIN_TABLE_BITS, (2 * len(self.tokens)).bit_length())
        tokens = np.array(self.tokens, np.uint64)
        for order in ORDERS:
            newest = np.full(1 << self._bits, NOWHERE, np.int32)
            older = np.full(len(tokens), NOWHERE, np.int32)
            if len(tokens) >= order:
                places = _places(tokens, order, self._bits)
                positions = np.arange(order - 1, len(tokens), dtype=np.int32)
                by_place = np.argsort(places, kind="stable")
                ranked, ordered = places[by_place], positions[by_place]
                same = ranked[1:] == ranked[:-1]
                older[ordered[1:][same]] = ordered[:-1][same]
                is_newest = np.append(~same, True)
                newest[ranked[is_newest]] = ordered[is_newest]
            self._newest[order] = array("i", newest.tobytes())
            self._older[order] = array("i", older.tobytes())


def _places(tokens: NDArray[np.uint64], order: int, bits: int) -> NDArray[np.int64]:
    """Return the table's places of all n-grams, as `SuffixIndex._add` computes them."""
    count = len(tokens) - order + 1
    keys = np.zeros(count, np.uint64)
    for offset in range(order):
        keys = (keys + tokens[offset : offset + count]) * np.uint64(_FACTOR)
    return (keys >> np.uint64(_BITS - bits)).astype(np.int64)
