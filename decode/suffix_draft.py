"""Drafts without a draft model: what followed the same tokens earlier in the request's own text.

The longest match of the newest tokens is found, and its continuations vote for each next token. The
chain ends where a token is too likely to be rejected for what it costs. The probability is measured
for each request, by the length of the match: text that repeats itself is drafted far ahead, other
text is not drafted. Only the request's own tokens are used, so no timing shows another request's
text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decode.draft_costs import UNKNOWN_PROBABILITY
from decode.suffix_index import MAX_MATCH, Occurrences, SuffixIndex
from engine.core.draft_trees import NO_TREE, TokenTree

# A match is in the class of the first limit that it does not exceed.
MATCH_CLASSES = (2, 3, 5, 8, MAX_MATCH)
FIRST_GUESSES = (0.4, 0.5, 0.6, 0.7, 0.8)  # accepted tokens per drafted one, before a measurement
_CLASSES = tuple(
    next(place for place, limit in enumerate(MATCH_CLASSES) if length <= limit)
    for length in range(MAX_MATCH + 1)
)
MEMORY = 0.9  # the weight of earlier measurements


@dataclass(frozen=True)
class LikelyChain:
    """A drafted chain.

    `expected` is the number of its tokens that are accepted on average. `whole` is the probability
    that all are; 0 if the chain is shorter than allowed.
    """

    tree: TokenTree = NO_TREE
    expected: float = 0.0
    whole: float = 0.0


NO_CHAIN = LikelyChain()


@dataclass(frozen=True)
class _Guess:
    """A drafted chain, to be compared with the tokens from `start` on."""

    start: int
    match_len: int
    token_ids: tuple[int, ...]


@dataclass
class SuffixDraft:
    """The drafts of one request. Belongs to the engine thread."""

    _index: SuffixIndex = field(default_factory=SuffixIndex)
    _accepted: list[float] = field(default_factory=lambda: list(FIRST_GUESSES))
    _last: _Guess | None = None

    def propose(
        self,
        prompt: Sequence[int],
        outputs: Sequence[int],
        max_nodes: int,
        least_probability: float = UNKNOWN_PROBABILITY,
    ) -> LikelyChain:
        """Return a chain of at most `max_nodes` tokens to follow prompt and outputs.

        Its tokens are accepted with at least this probability, as far as is known. Prompt and
        outputs may only have grown since the last call.
        """
        known = len(self._index)
        self._index.extend([*prompt[known:], *outputs[max(0, known - len(prompt)) :]])
        self._learn()
        found = self._index.find()
        if not found.ends or not max_nodes:
            self._last = None
            return NO_CHAIN
        chain, probabilities = self._chain(found, max_nodes, least_probability)
        self._last = _Guess(len(self._index), found.length, chain)
        count = len(probabilities)
        return LikelyChain(
            TokenTree.chain(chain[:count]),
            sum(probabilities),
            probabilities[-1] if count == max_nodes else 0.0,
        )

    def _chain(
        self, found: Occurrences, max_nodes: int, least_probability: float
    ) -> tuple[tuple[int, ...], list[float]]:
        """Return the continuation with most votes, and the probabilities of its worthwhile tokens.

        A token's probability is that of the chain up to it. The first token is always in the chain,
        so that a chance that rises is noticed.
        """
        ends = found.ends
        chain: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        for depth in range(max_nodes):
            followers = [self._index.following(end, depth) for end in ends]
            token_id = max(followers, key=followers.count)  # of equal ones the newest
            count = followers.count(token_id)
            chain.append(token_id)
            probability *= self._accepted[_class_of(found.length + depth)] * count / len(ends)
            if probability < least_probability:
                break
            probabilities.append(probability)
            if count < len(ends):
                ends = tuple(
                    end
                    for end, follower in zip(ends, followers, strict=True)
                    if follower == token_id
                )
        return tuple(chain), probabilities

    def _learn(self) -> None:
        """Compare the last chain with the tokens that followed."""
        if self._last is None:
            return
        guess, self._last = self._last, None
        actual = self._index.tokens[guess.start :]
        for depth, (drafted, token_id) in enumerate(zip(guess.token_ids, actual, strict=False)):
            match = _class_of(guess.match_len + depth)
            is_equal = drafted == token_id
            self._accepted[match] = MEMORY * self._accepted[match] + (1 - MEMORY) * is_equal
            if not is_equal:
                return


def _class_of(match_len: int) -> int:
    return _CLASSES[min(match_len, MAX_MATCH)]
