"""Worker status for people: why no pair can serve, and the state of each worker."""

from collections.abc import Iterable, Sequence

from protos import generation_pb2
from router.workers.worker import Worker, WorkerRole
from runtime.digests import may_pair, named_difference


def pair_problem(workers: Sequence[Worker]) -> str:
    """Return, for operators, why no prefill and decode worker of `workers` form a pair.

    No two of `workers` may be a pair.
    """
    for role in WorkerRole:
        if not _usable(workers, role):
            return _none_usable(
                role, (f"{worker.address}: {worker.problem}" for worker in _of(workers, role))
            )
    prefill, decode = (_usable(workers, role)[0].info for role in WorkerRole)
    assert prefill is not None
    assert decode is not None
    here, there = (info.compatibility_text or info.compatibility for info in (prefill, decode))
    return (
        f"prefill and decode workers do not fit together: they differ{named_difference(here, there)}; prefill "
        f"has {here}, decode has {there}"
    )


def are_missing(workers: Sequence[Worker]) -> bool:
    """Return whether a role has no usable worker. If both have, they do not fit together."""
    return not all(_usable(workers, role) for role in WorkerRole)


def refusal(workers: Sequence[Worker]) -> str:
    """Return `pair_problem` for clients: the same reason without addresses of the cluster."""
    for role in WorkerRole:
        if not _usable(workers, role):
            # The text after a colon is the cause, which may name hosts.
            reasons = dict.fromkeys(
                worker.problem.partition(":")[0] for worker in _of(workers, role)
            )
            return _none_usable(role, filter(None, reasons))
    return pair_problem(workers)


def statuses(workers: Sequence[Worker]) -> list[generation_pb2.WorkerStatus]:
    """Return the status of every worker, with the reason if one is not in use."""
    return [
        _status(worker, worker.problem or worker.unlisted or _unpaired(worker, workers))
        for worker in workers
    ]


def without_addresses(
    statuses: Iterable[generation_pb2.WorkerStatus],
) -> list[generation_pb2.WorkerStatus]:
    """Return the statuses for clients: numbers instead of addresses, and reasons without causes."""
    shown = []
    counts = dict.fromkeys(WorkerRole, 0)
    for status in statuses:
        role = WorkerRole(status.role)
        status.address, status.reason = f"{role}-{counts[role]}", status.reason.partition(":")[0]
        counts[role] += 1
        shown.append(status)
    return shown


def _of(workers: Iterable[Worker], role: WorkerRole) -> list[Worker]:
    return [worker for worker in workers if worker.role is role]


def _usable(workers: Iterable[Worker], role: WorkerRole) -> list[Worker]:
    return [worker for worker in _of(workers, role) if worker.is_usable]


def _none_usable(role: WorkerRole, reasons: Iterable[str]) -> str:
    return f"no {role} worker is usable ({'; '.join(reasons) or 'none found'})"


def _unpaired(worker: Worker, workers: Sequence[Worker]) -> str:
    """Return why no worker of the other role fits this one; empty if one does."""
    role = WorkerRole.DECODE if worker.role is WorkerRole.PREFILL else WorkerRole.PREFILL
    others = [other for other in _usable(workers, role) if other.info is not None]
    if any(may_pair(worker.compatibility, other.compatibility) for other in others):
        return ""
    if not others:
        return f"no {role} worker is usable"
    mine = "" if worker.info is None else worker.info.compatibility_text
    theirs = dict.fromkeys(
        other.info.compatibility_text for other in others if other.info is not None
    )
    return f"no usable {role} worker fits it: " + "; ".join(
        _difference(mine, text) for text in theirs
    )


def _difference(mine: str, theirs: str) -> str:
    """Return the named difference; both texts if none is named."""
    named = named_difference(mine, theirs)
    return f"they differ{named}" if named else f"it has {mine}; there {theirs}"


def _status(worker: Worker, reason: str) -> generation_pb2.WorkerStatus:
    load = worker.load
    status = generation_pb2.WorkerStatus(
        role=worker.role,
        address=worker.address,
        serving=worker.is_usable,
        reason=reason,
        queued_requests=load.queued_requests,
        running_requests=load.running_requests,
        pages_free=load.pages_free,
        slots_free=load.slots_free,
        open_sessions=load.open_sessions,
        busy_s=load.busy_s,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        data_ranks=load.data_ranks,
        roles_epoch=load.roles_epoch,
        queued_tokens=load.queued_tokens,
        prompt_tokens_per_s=worker.prefill_pace.tokens_per_s or 0.0,
        token_s=worker.decode_pace.token_s(worker.num_booked) or 0.0,
    )
    if worker.info is not None:
        status.able_roles.extend(worker.info.roles or [worker.role])
        status.roles.extend(load.roles or status.able_roles)
        status.max_batch_requests = (
            worker.info.max_batch_requests or worker.info.max_running_requests
        )
        status.incarnation = worker.info.incarnation
        status.stages.extend(worker.info.stages)
        status.tensor_size = worker.info.tensor_size
        status.pages_total = worker.info.pages_total
        status.slots_total = worker.info.slots_total
    return status
