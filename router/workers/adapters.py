"""The adapters that workers offer, and the workers that have one."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from router.text.model_facts import ServedAdapters
from router.workers.worker import Worker, WorkerRole
from runtime.model_files.adapter_folders import adapter_name


def served_adapters(workers: Iterable[Worker]) -> ServedAdapters:
    """Return the adapters that workers of both roles accept.

    While workers change from one version of an adapter to another, the one that more of them offer
    counts.
    """
    reported = set[WorkerRole]()
    accepting: dict[str, set[WorkerRole]] = defaultdict(set)  # by key
    offering: dict[str, set[WorkerRole]] = defaultdict(set)  # by name
    offers: Counter[str] = Counter()
    for worker in workers:
        if worker.info is None:
            continue
        reported.add(worker.role)
        retired = set(worker.info.retired_adapters)
        for key in worker.info.adapters:
            accepting[key].add(worker.role)
            if key not in retired:
                offering[adapter_name(key)].add(worker.role)
                offers[key] += 1
    ranked = sorted(_of_both_roles(accepting), key=lambda key: (offers[key], key))
    # The last of a name counts.
    offered = {adapter_name(key): key for key in ranked if offers[key]}
    former: dict[str, tuple[str, ...]] = {}
    for key in ranked:
        if offered.get(name := adapter_name(key)) != key:
            former[name] = (*former.get(name, ()), key)
    return ServedAdapters(
        dict(sorted(offered.items())),
        former,
        frozenset(_of_both_roles(offering)) - offered.keys(),
        is_known=len(reported) == len(WorkerRole),
    )


def _of_both_roles(roles: Mapping[str, set[WorkerRole]]) -> list[str]:
    return [each for each, found in roles.items() if len(found) == len(WorkerRole)]


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
