"""What has come of one answer, so that another router can go on with it and each token arrives once."""

from collections.abc import Callable
from dataclasses import replace

from baton.values import Chunk, Event, PromptLogprobs, Query


class AnswerSoFar:
    """All choices of one query. Every event of every attempt passes through `news`."""

    def __init__(self, query: Query, draw_seed: Callable[[], int]) -> None:
        """A query that is drawn at random gets a seed, because the next router must draw with the same one."""
        if query.sampling.seed is None and query.sampling.temperature != 0:
            query = replace(query, sampling=replace(query.sampling, seed=draw_seed()))
        self._query = query
        self._num_choices = query.n or 1
        self._token_ids = {index: list(token_ids) for index, token_ids in enumerate(query.resumed)}
        self._drawn_by = dict(enumerate(query.resumed_from))
        self._finished: set[int] = set()
        self._held: dict[int, list[Chunk]] = {}
        self._num_scored = 1  # positions of the prompt; the first has no score

    @property
    def is_whole(self) -> bool:
        """Every choice has finished."""
        return len(self._finished) >= self._num_choices

    def query(self) -> Query:
        """The query of the next attempt. Text that was held back comes again."""
        self._held.clear()
        if not any(self._token_ids.values()):
            return self._query
        most = max(self._token_ids)
        return replace(self._query, resumed=tuple(tuple(self._token_ids.get(index, ())) for index in range(most + 1)),
                       resumed_from=tuple(self._drawn_by.get(index, "") for index in range(most + 1)))

    def news(self, event: Event) -> list[Event]:
        """What of an event has not come before."""
        index = event.index
        if index in self._finished:
            return []
        if not self._query.request_id:
            self._query = replace(self._query, request_id=event.request_id)
        if not isinstance(event, Chunk):
            self._finished.add(index)
            return [*self._held.pop(index, []), event]
        if event.prompt_logprobs is not None:
            return self._unseen(event, event.prompt_logprobs)
        if not event.token_ids:
            self._held.setdefault(index, []).append(event)  # until its finish is here: see GenerateRequest.resumed
            return []
        self._token_ids.setdefault(index, []).extend(event.token_ids)
        if not event.compatibility:
            return [event]
        if self._drawn_by.get(index):  # named before; another router names its own workers, which fit
            return [replace(event, compatibility="")]
        self._drawn_by[index] = event.compatibility
        return [event]

    def _unseen(self, event: Chunk, scores: PromptLogprobs) -> list[Event]:
        skipped = max(0, self._num_scored - scores.first_position)
        self._num_scored = max(self._num_scored, scores.first_position + len(scores.token_ids))
        if skipped >= len(scores.token_ids):
            return []
        return [replace(event, prompt_logprobs=PromptLogprobs(
            scores.first_position + skipped, scores.token_ids[skipped:], scores.logprobs[skipped:]))]
