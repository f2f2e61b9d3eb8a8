"""The workers from which a prefill worker may pull the beginning of a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router.workers.policies import PolicyContext
from router.workers.worker import Worker, WorkerRole
from router.workers.worker_set import WorkerSet
from runtime.digests import in_common, may_pair

UNSEEN_PULL_COST = 0.5  # of a worker that has not pulled yet

Cached = Mapping[str, int]
"""The cached tokens of a prompt by address."""
RankedHolders = Sequence[tuple[int, WorkerRole, str]]
"""Workers with cached tokens of a prompt: their number, role and address, most first."""


@dataclass(frozen=True)
class BlockHolders:
    """The workers with cached blocks of prompts."""

    workers: WorkerSet
    least_tokens: int  # that a pull must save

    def ranked(self, cached: Cached, in_pools: Sequence[Cached]) -> RankedHolders:
        """Return the workers with enough of a prompt to pull it, those with most first.

        Those of prefill workers and of groups of decode pools are given apart.
        """
        every = [(WorkerRole.PREFILL, cached), *((WorkerRole.DECODE, each) for each in in_pools)]
        return sorted(
            (
                (count, role, address)
                for role, by_address in every
                for address, count in by_address.items()
                if count >= self.least_tokens
            ),
            reverse=True,
        )

    def best(self, ranked: RankedHolders, source: Worker, num_cached: int) -> Worker | None:
        """Return the worker with most of a prompt, or None if a pull from it saves too little.

        The prefill worker `source` has `num_cached` of the prompt's tokens.
        """
        found = self._best(ranked, source, num_cached)
        return None if found is None else found[1]

    def weighed(
        self, context: PolicyContext, ranked: RankedHolders, sources: Sequence[Worker]
    ) -> PolicyContext:
        """Return the context for a choice among prefill workers, with what each could pull.

        A pulled token counts as cached, less the share of its computing time that a pull takes.
        """
        if not ranked:
            return context
        num_cached = dict(context.num_cached)
        for source in sources:
            own = num_cached.get(source.address, 0)
            if (found := self._best(ranked, source, own)) is not None:
                cost = source.load.pull_cost or UNSEEN_PULL_COST
                num_cached[source.address] = own + round((found[0] - own) * max(0.0, 1 - cost))
        return replace(context, num_cached=num_cached)

    def _best(self, ranked: RankedHolders, source: Worker, own: int) -> tuple[int, Worker] | None:
        """Return the first worker that lends to `source`, with its count, if that saves enough."""
        for count, role, address in ranked:
            if count - own < self.least_tokens:
                return None
            holder = self.workers.find(role, address)
            if holder is not None and address != source.address and _lends_to(holder, source):
                return count, holder
        return None


def _lends_to(holder: Worker, source: Worker) -> bool:
    """Return whether the blocks of a worker have all that `source` keeps of a prompt."""
    return (
        holder.is_usable
        and holder.info is not None
        and holder.info.lends_blocks
        and may_pair(source.compatibility, holder.compatibility)
        and in_common(source.compatibility, holder.compatibility) == source.compatibility
    )
