"""Stage 0 of a pool: runs the engine loop over the joined stages and reports when the pool can
serve.

The event loop's thread owns membership, sessions and readiness. The engine thread owns scheduler,
batch channel and model. A pool of one stage is formed from the start.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.core.layer_range import Placement
from engine.core.time_limits import HangWatch, StepLimit
from engine.loop import EngineLoop, LoopObserver, LostListener, Scheduler
from engine.pipeline.ahead import AheadStage
from engine.pipeline.stages import HeadStage, Pipeline, SingleStage
from engine.sampling.sampler import RequestSampler
from models.weights_digest import PoolWeights
from pool.pipeline.grammars import GrammarCheck
from pool.pipeline.group import StageGroup
from pool.pipeline.membership import PipelineService, StageLink
from pool.pipeline.session_reports import SessionReports
from pool.pipeline.stage_channel import (
    PoolChannel,
    RefusalCounts,
    check_channels,
    open_pool_channel,
)
from pool.stage.config import WorkerConfig
from pool.stage.plan import max_frame_bytes
from pool.stage.stage import Stage
from protos import pipeline_pb2 as pb
from runtime.clock import SystemClock
from runtime.digests import Compatibility
from runtime.errors import BatonError, PeerLostError, UnavailableError
from transfer.plan.handoff_terms import StageSessionEvent
from transfer.transport.forming import Forming

logger = logging.getLogger(__name__)

WARM_UP_PAUSE_S = 1.0  # seconds between two tries
WATCH_S = 0.25  # seconds between two checks of the engine
# Seconds that an unhealthy pool stays up after its requests ended, so that its count of broken
# invariants can be scraped.
LINGER_S = 20.0


class PoolListener(Protocol):
    """The owner of a leader: it warms the pool up, and shows whether the pool serves."""

    async def warm_up(self) -> None:
        """Send one token through all stages; the pool serves only after that."""
        ...

    def serving_changed(self, reason: str, *, serving: bool) -> None:
        """Show whether the pool serves; `reason` says why not."""
        ...


class Evictor(Protocol):
    """The end of a pool's requests before their last token."""

    async def empty(self, grace_s: float) -> None:
        """Let requests finish for some seconds, then hand the rest back to their routers."""
        ...

    async def hand_back(self, error: BatonError) -> None:
        """Hand all requests back at once."""
        ...


class Leader:
    """The leader of a pool: connects schedulers, one per data rank, to the stages.

    Implements `pool.pipeline.membership.MembershipObserver`. `reports` is the port with which the
    stage's transfer agent was built.

    If the engine finds the pipeline broken though no stage was lost, all streams are ended, the
    stages join again, and the pool forms again. A pool of one stage cannot form again, so `failure`
    is set and the process must end. The same holds for a pool whose state is not reliable any more
    (`unhealthy`): it never serves again.
    """

    def __init__(
        self,
        config: WorkerConfig,
        stage: Stage,
        schedulers: Sequence[Scheduler],
        sampler: RequestSampler,
        *,
        reports: SessionReports,
        listener: PoolListener,
        evictor: Evictor,
        observer: LoopObserver | None = None,
        on_frame: Callable[[int], object] = lambda num_bytes: None,
        count_refused: RefusalCounts = lambda channel: lambda reason: None,
    ) -> None:
        self._config = config
        self._stage = stage
        self._sampler = sampler
        self._listener = listener
        self._evictor = evictor
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._is_draining = False
        self._forming: Forming | None = None  # the current one
        self._dismissed: set[int] = set()
        self._failure: BatonError | None = None
        self._linger_s = 0.0
        self._is_hung = False
        self._reports = reports
        place = config.placement
        self._num_stages = place.pipeline_size
        self.group = StageGroup(
            stage.agent,
            [self._place(rank) for rank in range(config.world_size)],
            reports,
            grammars=stage.grammars,
        )
        self.loop = EngineLoop(
            *schedulers, observer=observer, step_limit=StepLimit(config.step_limit_s)
        )
        self._channel: PoolChannel | None = None
        self._ahead: AheadStage | None = None
        self._warming: asyncio.Task[None] | None = None
        self.service: PipelineService | None = None
        # Known once all stages have joined, like the values derived from it.
        self._weights: PoolWeights | None = None
        self._compatibility: Compatibility | None = None
        self.serving = False
        self.reason = "starting"
        if config.world_size > 1:
            self._channel = open_pool_channel(
                config,
                stage.device,
                max_bytes=max_frame_bytes(config, stage.plan),
                on_sent=on_frame,
                count_refused=count_refused,
            )
            self.service = self._pipeline_service(self._channel.address)

    def _pipeline_service(self, channel_address: bytes) -> PipelineService:
        """Return the service with which the other stages join."""
        config, stage = self._config, self._stage
        return PipelineService(
            layers=stage.plan.ranges,
            settings=stage.plan.settings,
            counted=stage.counted,
            leader_channel=channel_address,
            incarnation=stage.agent.incarnation,
            observer=self,
            check_channels=check_channels,
            tensor_size=config.tp,
            data_size=config.dp_attention,
            weights=stage.weights,
        )

    @property
    def failure(self) -> BaseException | None:
        """Return the reason for which this process can never serve again, or None."""
        return self._failure or self.loop.failure

    @property
    def grammars(self) -> GrammarCheck | None:
        """Return the check that compiles grammars on the stage that samples.

        None on a pool of one stage without a tokenizer.
        """
        if self._num_stages == 1 and (
            self._config.dp_attention == 1 or self._stage.grammars is None
        ):
            return self._stage.grammars
        return self.group

    @property
    def weights(self) -> PoolWeights | None:
        """Return the weights of all stages, or None before the pool has first formed."""
        return self._weights

    @property
    def compatibility(self) -> Compatibility:
        """Return the digest that this pool and another one must share.

        Raises:
            UnavailableError: the pool has not formed yet.
        """
        if self._compatibility is None:
            raise UnavailableError("the pool has not formed yet")
        return self._compatibility

    def start(self) -> None:
        """Start the engine. A pool of one stage then serves; a larger one waits for stages."""
        self.loop.start()
        if self._channel is None:
            self._know_weights([])
            single = self._of_one_process()
            on_lost = self._when_lost(self._fail)
            self.loop.post(lambda: self.loop.attach(single, on_lost))
            self._warming = asyncio.create_task(self._become_ready())
        else:
            self._set_serving(
                None,
                f"waiting for {self._config.world_size - 1} more "
                f"{'stages' if self._config.tp == 1 else 'processes'} to join",
            )

    def drain(self) -> None:
        """Accept no more requests; running ones continue."""
        self._is_draining = True
        self._close("draining")

    def stop(self) -> None:
        for leaving in self._leaving.values():
            leaving.cancel()
        self._close("stopping")
        if self._is_hung:
            return  # The engine thread would not take the command, and may be using the channel.
        self.loop.stop()
        if self._ahead is not None:
            self._ahead.close()
        if self._channel is not None:
            self._channel.close()

    def pool_formed(self, forming: Forming, links: list[StageLink]) -> None:
        """Connect this process's own channel; nothing is sent before `pool_ready`."""
        channel = self._channel
        assert channel is not None, "a pool of one stage has no other stage to form with"
        self.group.pool_formed(links)
        self._know_weights(links)
        self._forming = forming
        on_lost = self._when_lost(lambda error: self._form_anew(forming, error))
        addresses = [channel.address, *(link.channel_address for link in links)]

        def connect() -> None:
            # A connection that cannot be made is a broken pipeline as well.
            try:
                channel.connect(addresses, forming)
            except BatonError as error:
                on_lost(error)
                return
            self._stage.ranks.use(channel, channel.parts)
            self._sampler.reset()  # its request state ended with the previous epoch

        self.loop.post(connect)

    def pool_ready(self, forming: Forming) -> None:
        """Begin to send frames, because every member takes them."""
        channel = self._channel
        assert channel is not None, "a pool of one stage has no other stage to wait for"
        on_lost = self._when_lost(lambda error: self._form_anew(forming, error))
        first: Pipeline = (
            self._single(channel)
            if self._num_stages == 1
            else HeadStage(
                self._stage.executor,
                channel,
                size=self._num_stages,
                frame_timeout_s=self._config.frame_timeout_s,
                ranks=self._stage.ranks,
            )
        )
        self.loop.post(lambda: self.loop.attach(first, on_lost))
        self._warming = asyncio.create_task(self._become_ready())

    def _of_one_process(self) -> Pipeline:
        if not self._config.overlap_steps:
            return self._single()
        self._ahead = AheadStage(self._single(), self._stage.executor)
        return self._ahead

    def _single(self, channel: PoolChannel | None = None) -> SingleStage:
        return SingleStage(
            self._stage.executor, self._sampler, self._stage.drafter, self._stage.ranks, channel
        )

    def stage_answered(self, rank: int, answer: pb.JoinRequest) -> None:
        self.group.stage_answered(rank, answer)

    def _know_weights(self, links: list[StageLink]) -> None:
        every = [self._stage.weights, *(link.weights for link in links)]
        # The ranks of a stage have read the same weights.
        self._weights = PoolWeights.of(every[:: self._config.tp])
        self._compatibility = self._stage.plan.compatibility(self._weights)

    def stage_leaving(self, link: StageLink, grace_s: float) -> None:
        self._close(f"{self._place(link.rank)} of the pool is leaving")
        self._leaving[link.rank] = asyncio.create_task(self._dismiss(link, grace_s))

    def _place(self, rank: int) -> Placement:
        return Placement.of(
            rank, self._config.world_size, self._config.tp, self._config.dp_attention
        )

    async def _dismiss(self, link: StageLink, grace_s: float) -> None:
        await self._evictor.empty(grace_s)
        link.dismiss()

    def stage_lost(self, rank: int) -> None:
        leaving = self._leaving.pop(rank, None)
        if leaving is not None:
            leaving.cancel()
        # A dismissed stage has left, and so has one during drain; the leader of a pool that drains
        # ends all their streams.
        died = leaving is None and not self._is_draining and rank not in self._dismissed
        self._dismissed.discard(rank)
        what = f"{self._place(rank)} of the pool {'died' if died else 'left'}"
        logger.log(logging.WARNING if died else logging.INFO, what)
        self._close(what)
        if self._channel is not None:
            self._channel.fail(rank, what)
        error = PeerLostError(what)
        self.loop.post(lambda: self.loop.detach(error))
        self.group.stage_lost(rank, what)
        if self._config.tp > 1:
            self._dismiss_all()  # ranks of a stage wait for each other within a step

    def stage_event(self, rank: int, event: StageSessionEvent) -> None:
        self._reports.deliver(rank, event)

    def unhealthy(self, reason: str) -> None:
        """Stop serving for good after a broken invariant; only a new process serves again."""
        logger.error("the pool is unhealthy: %s", reason)
        self._linger_s = LINGER_S
        self._fail(UnavailableError(f"the pool is unhealthy: {reason}"))

    async def until_failed(self) -> UnavailableError:
        """Wait until this process can never serve again, then hand all requests back.

        Return the error that they end with. For an unhealthy pool it returns some seconds later. An
        engine that has been in one step for longer than its limit counts as hung, because otherwise
        its requests would end only at their deadlines.
        """
        watch = HangWatch(SystemClock())
        while self.failure is None:  # there is no event for a thread's end
            await asyncio.sleep(WATCH_S)
            if watch.is_over(self.loop.busy_since_s, self.loop.step_limit.seconds):
                self._is_hung = True
                self._fail(
                    UnavailableError(
                        f"the engine has been in one step for more than "
                        f"{self.loop.step_limit.seconds:g} s"
                    )
                )
        error = UnavailableError(f"this worker cannot continue: {self.failure}")
        self._close(str(error))
        await self._evictor.hand_back(error)
        await asyncio.sleep(self._linger_s)
        return error

    def _when_lost(self, then: Callable[[BatonError], None]) -> LostListener:
        """Return a listener for the engine thread that calls `then` on the event loop."""
        events = asyncio.get_running_loop()
        return lambda error: events.call_soon_threadsafe(then, error)

    def _form_anew(self, forming: Forming, error: BatonError) -> None:
        if forming is not self._forming or not self.group.formed:
            return  # caused by a lost stage, which is handled already
        logger.warning("the pipeline broke: %s; its stages must join again", error)
        self._close(f"the pipeline broke: {error}")
        self._dismiss_all()

    def _dismiss_all(self) -> None:
        """Dismiss all joined stages, so that they join again."""
        for link in self.group.links:
            self._dismissed.add(link.rank)
            link.dismiss()

    def _fail(self, error: BatonError) -> None:
        self._failure = self._failure or error  # keep the root cause
        self._close(str(error))

    def _close(self, reason: str) -> None:
        if self._warming is not None:
            self._warming.cancel()
        self._set_serving(None, reason)

    async def _become_ready(self) -> None:
        while True:
            try:
                await self._listener.warm_up()
                break
            except BatonError as error:
                logger.warning("the warm-up failed: %s", error)
                self._set_serving(None, f"warm-up failed: {error}")
            await asyncio.sleep(WARM_UP_PAUSE_S)
        self._set_serving(self._num_stages, "")

    def _set_serving(self, stages: int | None, reason: str) -> None:
        if stages and (self._is_draining or self._leaving or self.failure is not None):
            # A stage that joins now must not start serving: accepted requests would be handed back
            # soon.
            return
        self.serving = stages is not None
        self.reason = reason
        logger.info("serving with %d stages", stages) if stages else logger.info(
            "not serving: %s", reason
        )
        self._listener.serving_changed(reason, serving=self.serving)
