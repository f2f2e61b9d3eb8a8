"""The adapters that workers offer, and the workers that have one."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from router.text.model_facts import ServedAdapters
from router.workers.worker import Worker, WorkerRole
from runtime.model_files.adapter_folders import adapter_name


def served_adapters(workers: Iterable[Worker]) -> ServedAdapters:
    """Return the adapters that workers of both roles accept.

    While workers change from one version of an adapter to another, the one that more of them offer
    counts.
    """
    reported = set[WorkerRole]()
    roles: dict[str, set[WorkerRole]] = defaultdict(set)
    offers: Counter[str] = Counter()
    for worker in workers:
        if worker.info is not None:
            reported.add(worker.role)
            retired = set(worker.info.retired_adapters)
            for key in worker.info.adapters:
                roles[key].add(worker.role)
                offers[key] += key not in retired
    accepted = [key for key in offers if len(roles[key]) == len(WorkerRole)]
    ranked = sorted(accepted, key=lambda key: (offers[key], key))
    # The last of a name counts.
    offered = {adapter_name(key): key for key in ranked if offers[key]}
    former: dict[str, tuple[str, ...]] = {}
    for key in ranked:
        if offered.get(name := adapter_name(key)) != key:
            former[name] = (*former.get(name, ()), key)
    having: dict[str, set[WorkerRole]] = defaultdict(set)
    for key, count in offers.items():
        if count:
            having[adapter_name(key)] |= roles[key]
    return ServedAdapters(
        dict(sorted(offered.items())),
        former,
        frozenset(
            name
            for name, role_set in having.items()
            if len(role_set) == len(WorkerRole) and name not in offered
        ),
        is_known=len(reported) == len(WorkerRole),
    )


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
