"""Health status: SERVING only after a token went through admission, prefill, handoff and decode.

The status is lost with the last pair of workers, and regained by another warm-up.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry

from protos import types_pb2
from router.request.answer import Answer, Output, ResponseQueue
from router.request.flow import RequestFlow, Services
from router.request.timeline import Timeline
from router.request.validate import AdmissibleRequest
from router.workers.report import are_missing
from runtime.clock import Deadline, LoopClock, SystemClock
from runtime.errors import BatonError
from runtime.observe.metrics.router import RouterMetrics
from runtime.rpc.server import Health

logger = logging.getLogger(__name__)

SERVICE = "baton.v1.Generation"
RETRY_PAUSE_S = 0.5
NOTICE_S = 20.0  # without a pair of workers before a log line
# For this time, a router without a pair so far treats missing workers as starting.
STARTING_S = 180.0
# A prompt that every vocabulary has; one token comes from prefill and one from decode.
WARM_UP_PROMPT = (0, 0, 0, 0)
WARM_UP_TOKENS = 2


class Readiness:
    """Updater of the public service's health; `run` until cancelled."""

    def __init__(
        self,
        services: Services,
        health: Health,
        warm_up_s: float,
        names: Sequence[str] = (SERVICE,),
    ) -> None:
        """`names` are the services that work when a token goes through."""
        self._names = names
        self._directory = services.directory
        # The warm-up is not a client's request and must not appear in the metrics of requests.
        self._services = replace(services, metrics=RouterMetrics.create(CollectorRegistry()))
        self._health = health
        self._warm_up_s = warm_up_s

    async def run(self) -> None:
        problem = ""
        while True:
            await self._pair((problem, logging.WARNING))
            if not await self._warm_up():
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            for name in self._names:
                await self._health.set_serving(name)
            logger.info("ready")
            await self._directory.until_paired(is_paired=False)
            problem = self._directory.pair_problem()
            for name in self._names:
                await self._health.set_not_serving(name)
            logger.warning("not ready", extra={"reason": problem})

    async def _pair(self, told: tuple[str, int]) -> None:
        """Wait for a pair of workers; log each new reason for its absence once.

        `told` is the last reason and its level. Before its first pair, the router treats missing
        workers as starting.
        """
        deadline = Deadline.after(LoopClock(), 0.0 if told[0] else STARTING_S)
        while not await self._paired_soon():
            problem = self._directory.pair_problem()
            starts = not deadline.is_over and are_missing(self._directory.workers)
            now = (problem, logging.INFO if starts else logging.WARNING)
            if problem and now != told:
                logger.log(
                    now[1],
                    "waiting for workers" if starts else "not ready",
                    extra={"reason": problem},
                )
                told = now

    async def _paired_soon(self) -> bool:
        """Return whether there is a pair of workers within `NOTICE_S`."""
        try:
            async with asyncio.timeout(NOTICE_S):
                await self._directory.until_paired(is_paired=True)
        except TimeoutError:
            return False
        return True

    async def _warm_up(self) -> bool:
        engine = types_pb2.EngineRequest(
            request_id=f"warm-up-{uuid.uuid4().hex}",
            prompt_token_ids=WARM_UP_PROMPT,
            max_tokens=WARM_UP_TOKENS,
            sampling=types_pb2.SamplingParams(temperature=0, seed=0, top_p=1, repetition_penalty=1),
        )
        answer = Answer(
            engine.request_id,
            0,
            Output(engine, (), None),
            ResponseQueue(self._warm_up_s),
            Timeline(SystemClock(), self._services.metrics),
        )
        flow = RequestFlow(
            AdmissibleRequest(engine, (), wants_text=False), answer, self._services, self._warm_up_s
        )
        try:
            await flow.run()
        except BatonError as error:
            logger.warning("the warm-up failed", extra={"reason": str(error)})
        return answer.has_ended
