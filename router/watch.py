"""Follows one worker's reports for as long as the router runs; at most one stream and one reconnect at a time."""

import asyncio
import logging
import random

import grpc

from protos import worker_pb2, worker_pb2_grpc
from router.model_facts import ModelFacts
from router.worker import Worker

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0
MIN_SILENCE_S = 2.0  # a worker that owes reports for this long, and for this many intervals, is lost
SILENT_INTERVALS = 5


async def watch_worker(worker: Worker, facts: ModelFacts, interval_s: float, rng: random.Random) -> None:
    """Keep `worker` up to date until cancelled."""
    backoff_s = FIRST_BACKOFF_S
    while True:
        reason = await _follow(worker, facts, interval_s)
        if worker.is_usable:
            logger.warning("worker lost", extra={"worker": worker.address, "reason": reason})
            backoff_s = FIRST_BACKOFF_S
        worker.lost(reason)
        await asyncio.sleep(backoff_s * rng.uniform(0.8, 1.2))
        backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


async def _follow(worker: Worker, facts: ModelFacts, interval_s: float) -> str:
    """Apply reports until they end; the reason why they did."""
    silence_s = max(MIN_SILENCE_S, SILENT_INTERVALS * interval_s)
    call = worker_pb2_grpc.WorkerStub(worker.channel).Watch(worker_pb2.WatchRequest(interval_s=interval_s))
    try:
        async with asyncio.timeout(silence_s) as patience:
            async for response in call:
                patience.reschedule(asyncio.get_running_loop().time() + silence_s)
                if not _apply(worker, facts, response):
                    return "it reported load before it said what it is"
    except TimeoutError:
        return f"no report for {silence_s:g} s"
    except grpc.aio.AioRpcError as error:
        return f"cannot be reached: {error.details() or error.code().name}"
    finally:
        call.cancel()
    return "it ended its reports"


def _apply(worker: Worker, facts: ModelFacts, response: worker_pb2.WatchResponse) -> bool:
    if response.HasField("info"):
        logger.info("worker found", extra={"worker": worker.address, "incarnation": response.info.incarnation})
        worker.introduced(response.info, facts)
    elif worker.info is None:
        return False
    elif response.HasField("load"):
        worker.reported(response.load, facts)
    return True
