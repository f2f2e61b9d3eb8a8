"""Prompts of simulated clients.

Their tokens are never computed, so messages carry zeros of the right length. Common prefixes are
known from the blocks of the trace. Page names, which otherwise are digests of all tokens up to the
page's end (`runtime.digests`), are numbers here. Two of them are equal when the digests would be.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

from baton.workload import BLOCK_TOKENS, Planned
from protos import types_pb2
from router.workers.prefix_index import RoutedPrompt
from runtime.digests import NAME_BYTES

VOCAB_SIZE = 1 << 28
_HALF = NAME_BYTES // 2
_BLOCK_BITS = 96  # of a block's id: ids of a trace have 64, and copies of a trace add more
_ZEROS_STEP = 1024  # token counts of the cached messages of zeros are multiples of this


@dataclass(frozen=True)
class TracedTokens(Sequence[int]):
    """Token ids of a traced prompt, created on first access.

    Tokens of a trace's block are the same in every prompt; all other tokens are unique to the
    request.
    """

    number: int  # index of the request
    planned: Planned

    def __len__(self) -> int:
        return self.planned.prompt_tokens

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        return self._ids[place]

    @cached_property
    def _ids(self) -> "array[int]":
        ids = array("I")
        for block, count in self.runs():
            token_id = VOCAB_SIZE - 1 - self.number if block is None else block + 1
            ids += array("I", (token_id,)) * count
        return ids

    def runs(self) -> Iterator[tuple[int | None, int]]:
        """Yield blocks and their numbers of tokens; the block is None for tokens outside blocks."""
        left = self.planned.prompt_tokens
        size = self.planned.block_tokens
        for block in self.planned.blocks[: -(-left // size)]:
            count = min(left, size)
            left -= count
            yield block, count
        if left:
            yield None, left


@dataclass(frozen=True)
class SimulatedPrompt(RoutedPrompt):
    """A prompt named by numbers instead of token digests.

    `numbers` has one number for each trace block of the prompt, which identifies all tokens up to
    the block's end; the last one includes tokens outside blocks. `places` are encoded page indices,
    shared by all prompts and as long as the longest one so far.
    """

    numbers: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS
    places: list[bytes] = field(default_factory=list, compare=False)

    def block_names(self, page_size: int, compatibility: str) -> tuple[bytes, ...]:
        """Return the page names of all but the last token; all simulated workers are compatible."""
        key = page_size, ""
        if key not in self._names:
            self._names[key] = self.page_names(page_size)[: (self.num_tokens - 1) // page_size]
        return self._names[key]

    def page_names(self, page_size: int) -> tuple[bytes, ...]:
        """Return the names of all whole pages."""
        key = page_size, "whole"
        if key not in self._names:
            self._names[key] = self._named(page_size)
        return self._names[key]

    def _named(self, page_size: int) -> tuple[bytes, ...]:
        count = self.num_tokens // page_size
        names = list[bytes]()
        page = 0
        while len(self.places) < count:
            self.places.append(len(self.places).to_bytes(_HALF))
        for place, number in enumerate(self.numbers, 1):  # names pages that end in its block
            is_last = place == len(self.numbers)
            end = count if is_last else min(place * self.block_tokens // page_size, count)
            head = number.to_bytes(_HALF)
            names += [head + tail for tail in self.places[page:end]]
            page = end
        return tuple(names)

    @cached_property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def digest(self) -> str:
        return f"{self.numbers[-1]:x}-{self.num_tokens:x}"


class PromptBook:
    """Prompts of all clients of a run."""

    def __init__(self) -> None:
        self._num_numbers = 0
        # By previous number and block, combined into one integer.
        self._numbers: dict[int, int] = {}
        self._places: list[bytes] = []
        self._zeros: dict[int, types_pb2.EngineRequest] = {}  # by number of tokens

    def prompt(self, index: int, planned: Planned) -> SimulatedPrompt:
        """Return the prompt of request `index`."""
        tokens = TracedTokens(index, planned)
        known = self._numbers
        number = 0
        numbers = list[int]()
        for block, _ in tokens.runs():
            key = number << _BLOCK_BITS | (block or 0)
            found = None if block is None else known.get(key)
            if found is None:
                self._num_numbers += 1
                found = self._num_numbers
                if block is not None:
                    known[key] = found
            number = found
            numbers.append(number)
        return SimulatedPrompt(
            tokens,
            numbers=tuple(numbers),
            block_tokens=planned.block_tokens,
            places=self._places,
        )

    def request(self, num_tokens: int) -> types_pb2.EngineRequest:
        """Return a request with `num_tokens` prompt tokens and no other field.

        Copying from an existing message takes a tenth of the time of filling a new one.
        """
        count = -(-num_tokens // _ZEROS_STEP) * _ZEROS_STEP
        if count not in self._zeros:
            self._zeros[count] = types_pb2.EngineRequest(prompt_token_ids=[0] * count)
        request = types_pb2.EngineRequest()
        request.prompt_token_ids.MergeFrom(self._zeros[count].prompt_token_ids)
        del request.prompt_token_ids[num_tokens:]
        return request
