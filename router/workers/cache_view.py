"""What the router knows of the workers' prefix caches, for each prompt."""

from collections.abc import Iterable

from router.workers.prefix_index import PrefixIndex, RoleCaches, RoutedPrompt
from router.workers.worker import Worker, WorkerRole
from router.workers.worker_set import UsableWorkers
from runtime.digests import in_common


class CacheView:
    """The prefix caches of prefill workers and of decode pools, as they report them."""

    def __init__(self) -> None:
        self.of_role = {role: RoleCaches() for role in WorkerRole}

    @property
    def prefill(self) -> PrefixIndex:
        """Return the index of the prefix caches of prefill workers."""
        return self.of_role[WorkerRole.PREFILL].memory

    def cached(
        self, role: WorkerRole, usable: UsableWorkers, prompt: RoutedPrompt, source: str = ""
    ) -> dict[str, int]:
        """Return the prompt tokens that workers have in their prefix caches, by address.

        Of workers of one kind, the one with most comes first. `source`: digest of the prefill
        worker that would send the prompt to a decode pool.
        """
        return _found(self.of_role[role].memory, usable, prompt, source)

    def copied(self, usable: UsableWorkers, prompt: RoutedPrompt) -> dict[str, int]:
        """Return the prompt tokens of which prefill workers have copies in own tiers, by address."""
        copies = self.of_role[WorkerRole.PREFILL].copies
        return {} if copies.is_empty else _found(copies, usable, prompt)

    def placed(self, prompt: RoutedPrompt, worker: Worker) -> None:
        """Tell the listener of the prefill workers' caches that a prompt was given to `worker`."""
        listener = self.prefill.listener
        if listener is not None and worker.role is WorkerRole.PREFILL:
            snapshot = worker.snapshot
            listener.placed(prompt, snapshot.page_size, snapshot.compatibility)


def _found(
    index: PrefixIndex, usable: UsableWorkers, prompt: RoutedPrompt, source: str = ""
) -> dict[str, int]:
    """Return the prompt tokens before the deepest resume points in an index, by address."""
    kinds: Iterable[tuple[int, str]] = {
        (page_size, in_common(compatibility, source or compatibility))
        for page_size, compatibility in usable.block_kinds
    }
    return {
        address: depth * page_size
        for page_size, compatibility in kinds
        for address, depth in index.depths(prompt.block_names(page_size, compatibility)).items()
    }
