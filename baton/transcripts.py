"""Prompts of the turns of recorded conversations, with the responses that the server has given.

A recording names the blocks of each prompt, but has no text. A block that an earlier turn of the
conversation had has the same tokens again. A prompt that goes on after all whole blocks of an
earlier one goes on with its last tokens and its response, as a chat does.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

from baton.load_run import LoadRequest, always
from baton.values import ModelInfo, Query
from baton.workload import Planned, Tokens, query_of


def recorded_requests(
    info: ModelInfo, planned: Sequence[Planned], *, seed: int
) -> list[LoadRequest]:
    """Return the requests of a load, with the turns of its conversations.

    Every response has exactly the planned tokens, and the prompts random ordinary ones, for any
    model.
    """
    tokens = Tokens(info, seed)
    transcripts: dict[int, Transcript] = {}
    places = {
        (item.turn.session, item.turn.number): index
        for index, item in enumerate(planned)
        if item.turn is not None
    }
    requests = []
    for index, item in enumerate(planned):
        turn = item.turn
        if turn is None:
            query = query_of(item, tokens.tail(item, index), index)
            requests.append(LoadRequest(item.at_s, always(query)))
            continue
        transcript = transcripts.setdefault(turn.session, Transcript(tokens))
        requests.append(
            LoadRequest(
                item.at_s,
                partial(transcript.query, item, index),
                turn.number,
                turn.session,
                tuple(places[turn.session, number] for number in turn.after),
                turn.pause_s,
                partial(transcript.answered, item),
            )
        )
    return requests


class Transcript:
    """The prompts and responses of one conversation so far."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._blocks: dict[int, list[int]] = {}  # tokens of whole blocks
        # By the last whole block of a turn: the tokens after it, and the response.
        self._tails: dict[int, list[int]] = {}

    def query(self, item: Planned, index: int) -> Query:
        """Return the query of a turn; `index` is its number in the load."""
        size = item.block_tokens
        named = item.blocks[: -(-item.prompt_tokens // size)]
        prompt = list[int]()
        last = None
        for block in named:
            if block not in self._blocks or len(prompt) + size > item.prompt_tokens:
                break
            prompt += self._blocks[block]
            last = block
        if last is not None:
            prompt += self._tails.get(last, ())[: item.prompt_tokens - len(prompt)]
        prompt += self._tokens.tail(item, index, len(prompt), self._blocks)
        for place, block in enumerate(named[: item.prompt_tokens // size]):
            self._blocks.setdefault(block, prompt[place * size : (place + 1) * size])
        return query_of(item, prompt, index)

    def answered(self, item: Planned, query: Query, response: Sequence[int]) -> None:
        """Note the response to a turn."""
        num_whole = min(item.prompt_tokens // item.block_tokens, len(item.blocks))
        if num_whole:
            prompt = cast(tuple[int, ...], query.prompt)
            tail = prompt[num_whole * item.block_tokens :]
            self._tails[item.blocks[num_whole - 1]] = [*tail, *response]
