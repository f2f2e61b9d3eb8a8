"""The blocks of a prompt that prefill workers need not compute: those in memory, those that they
read from tiers of their own, and those that they pull from other workers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.workers.worker import Worker, WorkerRole
from router.workers.worker_set import WorkerSet
from runtime.digests import in_common, may_pair

UNSEEN_COST = 0.5  # of a worker that has not pulled, or read from a tier, yet

Cached = Mapping[str, int]
"""The cached tokens of a prompt by address."""
RankedHolders = Sequence[tuple[int, WorkerRole, str]]
"""Workers with cached tokens of a prompt: their number, role and address, most first."""


@dataclass(frozen=True)
class HeldBlocks:
    """The tokens of a prompt that prefill workers have or could get, by address.

    Attributes:
        owned: in memory, or in a tier of the worker unless that is slower than to pull them.
        worth: that it need not compute. One that is read or pulled counts as cached, less the share
            of its computing time that this takes.
        ranked: the workers with enough of the prompt to pull it.
    """

    owned: Cached
    worth: Cached
    ranked: RankedHolders = ()


def read_from_tiers(cached: Cached, copied: Cached, sources: Iterable[Worker]) -> HeldBlocks:
    """Return the blocks that `sources` have, without pulls.

    `cached` has the tokens in memory, and `copied` those in tiers of their own.
    """
    owned, worth = dict(cached), dict(cached)
    for source in sources:
        in_memory, count = cached.get(source.address, 0), copied.get(source.address, 0)
        if count > in_memory:
            load = source.load
            if (load.copy_cost or UNSEEN_COST) <= (load.pull_cost or UNSEEN_COST):
                owned[source.address] = count
            worth[source.address] = in_memory + _saved(count - in_memory, load.copy_cost)
    return HeldBlocks(owned, worth)


@dataclass(frozen=True)
class BlockHolders:
    """The workers from which a prefill worker may pull the beginning of a prompt."""

    workers: WorkerSet
    least_tokens: int  # that a pull must save; 0: there are none

    def with_pulls(
        self,
        held: HeldBlocks,
        by_role: Iterable[tuple[WorkerRole, Cached]],
        sources: Iterable[Worker],
    ) -> HeldBlocks:
        """Return the blocks that `sources` have or could pull.

        `by_role` has the tokens in the memory of prefill workers, and of each group of decode pools.
        """
        ranked = sorted(
            (
                (count, role, address)
                for role, by_address in by_role
                for address, count in by_address.items()
                if count >= self.least_tokens
            ),
            reverse=True,
        )
        if not ranked:
            return held
        worth = dict(held.worth)
        for source in sources:
            own = held.owned.get(source.address, 0)
            if (found := self._best(ranked, source, own)) is not None:
                more = _saved(found[0] - own, source.load.pull_cost)
                without = worth.get(source.address, 0)
                worth[source.address] = max(without, min(without, own) + more)
        return HeldBlocks(held.owned, worth, ranked)

    def best(self, held: HeldBlocks, source: Worker) -> Worker | None:
        """Return the worker with most of the prompt, or None if a pull from it saves too little."""
        found = self._best(held.ranked, source, held.owned.get(source.address, 0))
        return None if found is None else found[1]

    def _best(self, ranked: RankedHolders, source: Worker, own: int) -> tuple[int, Worker] | None:
        """Return the first worker that lends to `source`, with its count, if that saves enough."""
        for count, role, address in ranked:
            if count - own < self.least_tokens:
                return None
            holder = self.workers.find(role, address)
            if holder is not None and address != source.address and _lends_to(holder, source):
                return count, holder
        return None


def _saved(num_tokens: int, cost: float) -> int:
    """Return the computed tokens that so many are worth, at this share of their computing time."""
    return round(num_tokens * max(0.0, 1 - (cost or UNSEEN_COST)))


def _lends_to(holder: Worker, source: Worker) -> bool:
    """Return whether the blocks of a worker have all that `source` keeps of a prompt."""
    return (
        holder.is_usable
        and holder.info is not None
        and holder.info.lends_blocks
        and may_pair(source.compatibility, holder.compatibility)
        and in_common(source.compatibility, holder.compatibility) == source.compatibility
    )
