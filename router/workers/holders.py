"""The worker from which a prefill worker may pull the beginning of a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass

from router.workers.worker import Worker, WorkerRole
from router.workers.worker_set import WorkerSet
from runtime.digests import in_common, may_pair


@dataclass(frozen=True)
class BlockHolders:
    """The workers with cached blocks of prompts.

    With a `least_tokens` of 0 none is ever named.
    """

    workers: WorkerSet
    least_tokens: int  # that a pull must save

    def best(
        self, cached: Mapping[WorkerRole, Mapping[str, int]], source: Worker, num_cached: int
    ) -> Worker | None:
        """Return the worker with most of a prompt, or None if a pull from it saves too little.

        `cached` has the prompt's cached tokens by role and address. The prefill worker `source` has
        `num_cached` of them.
        """
        if not self.least_tokens:
            return None
        most, best = num_cached + self.least_tokens - 1, None
        for role, by_address in cached.items():
            for address, count in by_address.items():
                if count > most and address != source.address:
                    holder = self.workers.find(role, address)
                    if holder is not None and _lends_to(holder, source):
                        most, best = count, holder
        return best


def _lends_to(holder: Worker, source: Worker) -> bool:
    """Return whether the blocks of a worker have all that `source` keeps of a prompt."""
    return (
        holder.is_usable
        and holder.info is not None
        and holder.info.lends_blocks
        and may_pair(source.compatibility, holder.compatibility)
        and in_common(source.compatibility, holder.compatibility) == source.compatibility
    )
