"""What the router knows of the workers' prefix caches, for each prompt."""

from collections.abc import Iterable

from router.workers.prefix_index import PrefixIndex, RoutedPrompt
from router.workers.worker import Worker, WorkerRole
from router.workers.worker_set import UsableWorkers
from runtime.digests import in_common


class CacheView:
    """The prefix caches of prefill workers and of decode pools, as they report them."""

    def __init__(self) -> None:
        self.prefill = PrefixIndex()
        self._pools = PrefixIndex()

    def index_of(self, role: WorkerRole) -> PrefixIndex:
        """Return the index that workers of a role report to."""
        return self.prefill if role is WorkerRole.PREFILL else self._pools

    def cached(
        self, role: WorkerRole, usable: UsableWorkers, prompt: RoutedPrompt, source: str = ""
    ) -> dict[str, int]:
        """Return the prompt tokens that workers have in their prefix caches, by address.

        Of workers of one kind, the one with most comes first. `source`: digest of the prefill
        worker that would send the prompt to a decode pool.
        """
        index = self.index_of(role)
        kinds: Iterable[tuple[int, str]] = {
            (page_size, in_common(compatibility, source or compatibility))
            for page_size, compatibility in usable.block_kinds
        }
        return {
            address: depth * page_size
            for page_size, compatibility in kinds
            for address, depth in index.depths(prompt.block_names(page_size, compatibility)).items()
        }

    def num_missing(self, usable: UsableWorkers, prompt: RoutedPrompt) -> int:
        """Return the prompt tokens left to compute on the prefill worker with most of the prompt
        cached.
        """
        cached = self.cached(WorkerRole.PREFILL, usable, prompt)
        return prompt.num_tokens - max(
            [num_cached for address, num_cached in cached.items() if address in usable.addresses],
            default=0,
        )

    def placed(self, prompt: RoutedPrompt, worker: Worker) -> None:
        """Tell the listener of the prefill workers' caches that a prompt was given to `worker`."""
        listener = self.prefill.listener
        if listener is not None and worker.role is WorkerRole.PREFILL:
            snapshot = worker.snapshot
            listener.placed(prompt, snapshot.page_size, snapshot.compatibility)
