"""Drawing under a grammar: tokens that it does not allow have no probability.

A row brings its grammar and the tokens drawn so far, so what is drawn is a function of the row alone, as ever: at a
node of a draft tree the row is that of its path. Matchers are kept between steps only to be quick; one that stands
elsewhere is moved, also back.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import GrammarRow, SamplingRow
from engine.core.request import DrawnToken
from engine.sampling.sampler import sample
from runtime.errors import InternalError, InvalidRequestError
from runtime.grammar import Grammar, GrammarMatcher, Grammars

MAX_MATCHERS = 1024


class GuidedSampler:
    """A `Sampler` for rows with and without grammars. Belongs to the engine thread of a last stage."""

    def __init__(self, grammars: Grammars | None) -> None:
        """Without `grammars` (a model without a tokenizer) rows must not bring any."""
        self._grammars = grammars
        self._matchers: OrderedDict[tuple[str, Grammar], GrammarMatcher] = OrderedDict()

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[DrawnToken]:
        """As `sample`. A row whose grammar cannot be followed gets a token with `problem` set."""
        if all(row.grammar is None for row in rows):
            return sample(logits, rows)
        problems: dict[int, str] = {}
        allowed: list[NDArray[np.bool_] | None] = [None] * len(rows)
        for index, row in enumerate(rows):
            if row.grammar is not None:
                try:
                    allowed[index] = self._allowed(row.grammar, logits.shape[1])
                except InvalidRequestError as error:
                    problems[index] = error.violations[0].description
        drawn = sample(logits, rows, allowed)
        return [DrawnToken(token.token_id, token.logprobs, problems[index]) if index in problems else token
                for index, token in enumerate(drawn)]

    def _allowed(self, row: GrammarRow, vocab_size: int) -> NDArray[np.bool_]:
        if self._grammars is None:
            raise InternalError("a row brings a grammar, but the model has no tokenizer")
        key = (row.request_id, row.grammar)
        matcher = self._matchers.pop(key, None) or self._grammars.matcher(row.grammar)
        matcher.move_to(row.token_ids)
        allowed = matcher.allowed(vocab_size)
        self._matchers[key] = matcher  # only now: one that failed stays failed
        if len(self._matchers) > MAX_MATCHERS:
            self._matchers.popitem(last=False)
        return allowed
