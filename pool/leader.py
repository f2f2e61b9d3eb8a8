"""Stage 0 of a pool: runs the engine loop over whatever stages are joined, and says when it can serve.

The event loop's thread owns membership, sessions and readiness; the engine thread owns scheduler, batch channel and
model. A pool of one stage is formed from the start.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engine.loop import EngineLoop, LoopObserver, Scheduler
from engine.pipeline.stages import HeadStage, SingleStage
from engine.sampling.sampler import Sampler
from pool.config import WorkerConfig
from pool.group import StageGroup
from pool.membership import PipelineService, StageLink
from pool.stage import Stage, max_frame_bytes
from runtime.errors import BatonError, PeerLostError
from transfer.stage_channel import UcxStageChannel
from transfer.terms import StageSessionEvent
from transfer.ucx_settings import TransportProfile

logger = logging.getLogger(__name__)

ServingListener = Callable[[bool, str], None]


class Leader:
    """Ties a scheduler to the stages of its pool. Satisfies `pool.membership.MembershipObserver`.

    `warm_up` sends one token through all stages; only when it returned does the pool serve. `empty` lets requests
    finish for some seconds and hands the rest back to their routers.
    """

    def __init__(self, config: WorkerConfig, stage: Stage, scheduler: Scheduler, sampler: Sampler, *,
                 warm_up: Callable[[], Awaitable[None]], on_serving: ServingListener,
                 empty: Callable[[float], Awaitable[None]],
                 observer: LoopObserver | None = None,
                 on_frame: Callable[[int], object] = lambda num_bytes: None) -> None:
        self._config = config
        self._stage = stage
        self._sampler = sampler
        self._warm_up = warm_up
        self._on_serving = on_serving
        self._empty = empty
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._is_draining = False
        self.group = StageGroup(stage.agent, config.world_size)
        self.loop = EngineLoop(scheduler, observer=observer)
        self._channel: UcxStageChannel | None = None
        self._warming: asyncio.Task[None] | None = None
        self.service: PipelineService | None = None
        self.serving = False
        self.reason = "starting"
        if config.world_size > 1:
            self._channel = UcxStageChannel(rank=0, max_frame_bytes=max_frame_bytes(config, stage.plan),
                                            profile=TransportProfile(config.transport), binding=config.binding,
                                            on_sent=on_frame)
            self.service = PipelineService(layers=stage.plan.ranges, compatibility=stage.plan.compatibility,
                                           leader_channel=self._channel.address, observer=self)

    def start(self) -> None:
        """Start the engine; a pool of one stage begins to serve, a larger one waits for its stages."""
        self.loop.start()
        if self._channel is None:
            single = SingleStage(self._stage.executor, self._sampler, self._stage.drafter)
            self.loop.post(lambda: self.loop.attach(single))
            self._warming = asyncio.create_task(self._become_ready())
        else:
            self._set_serving(None, f"waiting for {self._config.world_size - 1} more stages to join")

    def drain(self) -> None:
        """Take no more requests; what runs goes on."""
        self._is_draining = True
        self._close("draining")

    def stop(self) -> None:
        for leaving in self._leaving.values():
            leaving.cancel()
        self._close("stopping")
        self.loop.stop()
        if self._channel is not None:
            self._channel.close()

    def pool_formed(self, epoch: int, links: list[StageLink]) -> None:
        channel = self._channel
        assert channel is not None, "a pool of one stage has nobody to form with"
        self.group.pool_formed(links)
        addresses = [channel.address, *(link.channel_address for link in links)]
        head = HeadStage(self._stage.executor, channel, size=self._config.world_size)

        def attach() -> None:
            channel.connect(addresses, epoch)
            self.loop.attach(head)

        self.loop.post(attach)
        self._warming = asyncio.create_task(self._become_ready())

    def stage_leaving(self, link: StageLink, grace_s: float) -> None:
        self._close(f"stage {link.rank} of the pool is leaving")
        self._leaving[link.rank] = asyncio.create_task(self._let_go(link, grace_s))

    async def _let_go(self, link: StageLink, grace_s: float) -> None:
        await self._empty(grace_s)
        link.dismiss()

    def stage_lost(self, rank: int) -> None:
        leaving = self._leaving.pop(rank, None)
        if leaving is not None:
            leaving.cancel()
        died = leaving is None and not self._is_draining  # the leader of a pool that drains ends their streams itself
        self._close(f"stage {rank} of the pool {'died' if died else 'left'}")
        if self._channel is not None:
            self._channel.fail(rank, f"stage {rank} left the pool")
        error = PeerLostError(f"stage {rank} of the {self._config.world_size}-stage pool died")
        self.loop.post(lambda: self.loop.detach(error))
        self.group.stage_lost(rank)

    def stage_event(self, rank: int, event: StageSessionEvent) -> None:
        self.group.stage_event(rank, event)

    def unhealthy(self, reason: str) -> None:
        """An invariant broke: say so loudly and take no more requests."""
        logger.error("the pool is unhealthy: %s", reason)
        self._set_serving(None, reason)

    def _close(self, reason: str) -> None:
        if self._warming is not None:
            self._warming.cancel()
        self._set_serving(None, reason)

    async def _become_ready(self) -> None:
        try:
            await self._warm_up()
        except BatonError as error:
            self._set_serving(None, f"warm-up failed: {error}")
            return
        self._set_serving(self._config.world_size, "")

    def _set_serving(self, stages: int | None, reason: str) -> None:
        if stages and self._is_draining:
            return  # a stage that joins now comes too late
        self.serving, self.reason = stages is not None, reason
        logger.info("serving with %d stages", stages) if stages else logger.info("not serving: %s", reason)
        self._on_serving(self.serving, reason)
