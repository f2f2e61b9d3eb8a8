"""The adapters that workers offer, and the workers that have one."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from router.workers.worker import Worker, WorkerRole
from runtime.model_files.adapter_folders import adapter_name


def offered_adapters(workers: Iterable[Worker]) -> dict[str, str]:
    """Return the key of each offered adapter by its name, in the order of the names.

    Workers of both roles must accept it. While workers change from one version of an adapter to
    another, the one that more of them offer counts.
    """
    roles: dict[str, set[str]] = defaultdict(set)
    offers: Counter[str] = Counter()
    for worker in workers:
        if worker.info is not None:
            retired = set(worker.info.retired_adapters)
            for key in worker.info.adapters:
                roles[key].add(worker.role)
                offers[key] += key not in retired
    offered = [key for key, count in offers.items() if count and len(roles[key]) == len(WorkerRole)]
    ranked = sorted(offered, key=lambda key: (offers[key], key))
    found = {adapter_name(key): key for key in ranked}  # the last of a name counts
    return dict(sorted(found.items()))


def has_adapter(worker: Worker, key: str) -> bool:
    """Return whether a request with this adapter may run on the worker."""
    return worker.info is not None and key in worker.info.adapters


def with_adapter_loaded(workers: Sequence[Worker], key: str) -> Sequence[Worker]:
    """Return the workers that have the adapter in memory, or all if none has it."""
    loaded = [
        worker
        for worker in workers
        if worker.info is not None and key in worker.info.loaded_adapters
    ]
    return loaded or workers
