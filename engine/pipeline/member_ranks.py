"""Exchanges among some ranks of a stage: each of these sends its part of a product to the others."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.core.layer_range import TensorRank

Outgoing = tuple[Sequence[int], memoryview]  # ranks of the pool, and the bytes for them
Incoming = tuple[int, memoryview]  # a rank of the pool, and the place for its bytes


class PartMover(Protocol):
    """The exchanges of one rank with others, in the order in which all of them begin these."""

    def begin_exchange(self, first_number: int) -> int:
        """Open the next exchange of those counted from `first_number`, and return its number."""
        ...

    def move(self, outgoing: Sequence[Outgoing], coming: Sequence[Incoming], number: int) -> None:
        """Send bytes to ranks and receive those of others into their places."""
        ...


class MemberRanks:
    """`Ranks` for layers that only the `members` of a stage divide."""

    def __init__(
        self,
        mover: PartMover,
        members: range,
        own: TensorRank,
        *,
        rank: int,
        first: int,
        first_number: int,
    ) -> None:
        """Create the ranks `members` of a stage, seen from its `rank`.

        `own` is the place of that rank among them, and `first` the pool's number of the stage's
        first rank. Their exchanges are counted from `first_number`.
        """
        self.own = own
        self._mover = mover
        self._members = members
        self._rank = rank
        self._place = members.index(rank)
        self._first = first
        self._first_number = first_number

    def gather(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Implement `Ranks.gather`."""
        others = [self._first + rank for rank in self._members if rank != self._rank]
        return self._exchange([(others, part)], part, counts)

    def swap(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> Tensor:
        """Implement `Ranks.swap`."""
        sent = [
            ([self._first + rank], part)
            for rank, part in zip(self._members, parts, strict=True)
            if rank != self._rank
        ]
        return self._exchange(sent, parts[self._place], counts)

    def swap_shares(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """Implement `Ranks.swap_shares`."""
        number = self._mover.begin_exchange(self._first_number)
        own = shares[self._place]
        parts = [own if rank == self._rank else torch.empty_like(own) for rank in self._members]
        outgoing = list[Outgoing]()
        coming = list[Incoming]()
        for rank, share, part in zip(self._members, shares, parts, strict=True):
            if rank != self._rank:
                outgoing.append(([self._first + rank], bytes_of(share)))
                coming.append((self._first + rank, bytes_of(part)))
        self._mover.move(outgoing, coming, number)
        return parts

    def complete(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Implement `Ranks.complete`."""
        number = self._mover.begin_exchange(self._first_number)
        shares = torch.split(rows, list(counts))
        others = list[int]()
        coming = list[Incoming]()
        for rank, share in zip(self._members, shares, strict=True):
            if rank != self._rank:
                others.append(self._first + rank)
                coming.append((self._first + rank, bytes_of(share)))
        self._mover.move([(others, bytes_of(shares[self._place]))], coming, number)

    def _exchange(
        self,
        sent: Sequence[tuple[Sequence[int], Tensor]],
        own: Tensor,
        counts: Sequence[int] | None,
    ) -> Tensor:
        """Run the next exchange, and return the members' parts for this rank, concatenated.

        `sent` lists parts with the ranks of the pool that get them. The result has `own` for this
        rank, and from each other member as many rows as `own` has, or `counts`.
        """
        number = self._mover.begin_exchange(self._first_number)
        counts = [len(own)] * len(self._members) if counts is None else counts
        result = own.new_empty(sum(counts), *own.shape[1:])
        memory = bytes_of(result)
        row_bytes = own.itemsize * math.prod(own.shape[1:])
        end = 0
        coming = list[Incoming]()
        for rank, count in zip(self._members, counts, strict=True):
            start = end
            end = end + count * row_bytes
            if rank == self._rank:
                memory[start:end] = bytes_of(own)
            else:
                coming.append((self._first + rank, memory[start:end]))
        self._mover.move([(ranks, bytes_of(part)) for ranks, part in sent], coming, number)
        return result


def bytes_of(part: Tensor) -> memoryview:
    # Flattened first, because a dimension of one element may have any stride.
    return part.contiguous().flatten().view(torch.uint8).numpy().data
