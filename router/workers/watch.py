"""Subscription to one worker's reports for the router's lifetime.

At most one stream and one reconnect are active at a time.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc

from protos import worker_pb2, worker_pb2_grpc
from router.text.model_facts import ModelLimits
from router.workers.worker import Worker
from runtime.rpc.redial import renew
from runtime.rpc.unreachable import reach_problem

logger = logging.getLogger(__name__)

# a restarted worker is found within half a second
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 0.4
# A worker is lost after this silence, but not before this number of intervals.
MIN_SILENCE_S = 2.0
SILENT_INTERVALS = 5
RECHECK_S = 2.0  # until a name whose address belongs to another worker is resolved again
_LOOKS = 8  # checks during one silence
_MISSING = "a report of its prefix cache is missing"


Follow = Callable[[Worker, ModelLimits, float], Awaitable[str]]
"""Applies a worker's reports, sent at the given interval in seconds, until they end; returns the
reason.
"""


async def watch_worker(
    worker: Worker, facts: ModelLimits, interval_s: float, rng: random.Random, follow: Follow
) -> None:
    """Keep `worker` up to date until cancelled."""
    backoff_s = FIRST_BACKOFF_S
    while True:
        reason = await follow(worker, facts, interval_s)
        if worker.is_usable:
            logger.warning("worker lost", extra={"worker": worker.address, "reason": reason})
            backoff_s = FIRST_BACKOFF_S
        worker.lost(reason)
        await asyncio.sleep(backoff_s * rng.uniform(0.8, 1.2))
        backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


async def _run_out(scope: asyncio.Timeout, reported: asyncio.Event, silence_s: float) -> None:
    """Expire `scope` after `silence_s` without a report.

    The silence is checked in several steps. A process that was itself stopped counts that as one
    step, and handles pending messages before the next.
    """
    looks = 0
    while looks < _LOOKS:
        await asyncio.sleep(silence_s / _LOOKS)
        looks = 0 if reported.is_set() else looks + 1
        reported.clear()
    scope.reschedule(asyncio.get_running_loop().time())


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a task for the duration of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


def silence_s_of(interval_s: float) -> float:
    """Return the silence in seconds after which a worker is lost."""
    return max(MIN_SILENCE_S, SILENT_INTERVALS * interval_s)


async def follow_stream(worker: Worker, facts: ModelLimits, interval_s: float) -> str:
    """Follow a worker over its channel. Implements `Follow`."""
    silence_s = silence_s_of(interval_s)
    worker.caches.forget(worker.address)  # the stream begins with a complete cache report
    call = worker_pb2_grpc.WorkerStub(worker.channel).Watch(
        worker_pb2.WatchRequest(interval_s=interval_s, role=worker.role.value)
    )
    reported = asyncio.Event()
    began_s = asyncio.get_running_loop().time()
    try:
        async with (
            asyncio.timeout(None) as scope,
            _background(_run_out(scope, reported, silence_s)),
        ):
            async for response in call:
                reported.set()
                if problem := apply_report(worker, facts, response):
                    return problem
                is_over = asyncio.get_running_loop().time() - began_s >= RECHECK_S
                # The name's former address may now belong to another worker.
                if is_over and (other := _other_worker(worker)) and renew(worker.channel):
                    return other
    except TimeoutError:
        return f"no report for {silence_s:g} s"
    except grpc.aio.AioRpcError as error:
        return f"cannot be reached: {reach_problem(error.details() or error.code().name)}"
    finally:
        call.cancel()
    return "it ended its reports"


def _other_worker(worker: Worker) -> str:
    """Return why the process at this address is probably not the intended worker; empty if it may
    be.
    """
    return worker.mismatch or (
        f"it is a worker with another address, too: {worker.same_as}" if worker.same_as else ""
    )


def apply_report(worker: Worker, facts: ModelLimits, response: worker_pb2.WatchResponse) -> str:
    """Apply one report; return why the stream is no longer usable, empty if it is."""
    has_all = True
    if response.HasField("info"):
        known = _other_worker(worker)
        worker.introduced(response.info, facts)
        if worker.is_usable:  # its info has changed
            return ""
        if known and known == _other_worker(worker):
            return ""  # already logged
        if worker.mismatch:
            logger.warning(
                "worker refused", extra={"worker": worker.address, "reason": worker.mismatch}
            )
        else:
            logger.info(
                "worker found",
                extra={"worker": worker.address, "incarnation": response.info.incarnation},
            )
    elif worker.info is None:
        return "it reported load before its info"
    elif response.HasField("cache"):
        has_all = worker.caches.memory.report(worker.address, response.cache)
    elif response.HasField("copies"):
        has_all = worker.caches.copies.report(worker.address, response.copies)
    elif response.HasField("load"):
        return apply_load(worker, response.load)
    return "" if has_all else _MISSING


def apply_load(worker: Worker, load: worker_pb2.WorkerLoad) -> str:
    """Apply a load report of an introduced worker; return a problem as `apply_report` does."""
    has_all = worker.caches.has_all(worker.address, load)
    worker.reported(load)
    return "" if has_all else _MISSING
