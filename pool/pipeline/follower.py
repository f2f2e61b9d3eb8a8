"""A process of rank 1..n-1: joins the leader, serves its stage, and starts over when the leader is
gone.

Two threads: the engine thread owns the batch channel and the model, the event loop owns the Join
stream. The leader's life shows on that stream: when it drops, every session is closed, the batch
channel is left, and the stage joins again: as soon as a leader is there, and after a pause where
one refuses. A leader's name is looked up anew each time. A stage whose engine meets an error drops
the stream itself: its leader may not know of it. A stage that is to stop reports that on the stream
and serves on until its leader ends the stream.

It joins again only when nothing of the time before can touch its memory: the step that ran is over
and every transfer has drained. The leader relies on that (`pool.pipeline.group`): it has given
those pages away.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.core.batch import ForwardBatch
from engine.pipeline.stages import FollowerStage
from engine.sampling.sampler import RequestSampler
from pool.pipeline.forming import forming_from_proto
from pool.pipeline.grammars import NO_GRAMMARS, grammar_from_proto
from pool.pipeline.membership import JoinReports, JoinStream, weights_to_proto
from pool.pipeline.stage_channel import PoolChannel
from pool.stage.config import WorkerConfig
from pool.stage.stage import Stage
from protos import pipeline_pb2 as pb
from protos import pipeline_pb2_grpc
from runtime.errors import (
    BatonError,
    DeadlineError,
    FieldViolation,
    IntegrityError,
    InvalidRequestError,
    PeerLostError,
)
from runtime.rpc.client import ChannelOptions, open_channel
from runtime.rpc.redial import renew
from runtime.rpc.status import error_from_rpc, is_lost
from runtime.rpc.unreachable import reach_problem
from runtime.security.access import ChannelSecurity
from transfer.plan import codec
from transfer.transport.forming import Forming

REJOIN_MIN_S, REJOIN_MAX_S = (
    0.1,
    2.0,
)  # between two tries; the longer ones are for a leader that refuses
RECONNECT_S = (
    0.25  # between two looks whether the leader is there; nothing waits longer for one that is
)
ANSWER_S = 4.0  # for a leader that is there to answer
REPORT_S = 10.0  # between two warnings that it is not there
SETTLE_S = 60.0  # for the longest step; transfers are cut much earlier
GOODBYE_S = 3.0  # what a leader may take beyond the grace to hand requests back

logger = logging.getLogger(__name__)


class FollowerEngine:
    """The engine thread of a follower: serves frames while the pool is formed, waits for orders
    otherwise.

    Both are called from the thread: `on_connected` when the channel takes frames of a forming,
    `on_broken` when an error ended the serving, and the pool has to form anew.
    """

    def __init__(
        self,
        stage: Stage,
        sampler: RequestSampler,
        channel: PoolChannel,
        *,
        rank: int,
        size: int,
        on_step: Callable[[float, ForwardBatch], None],
        frame_timeout_s: float = 10,
    ) -> None:
        self._follower = FollowerStage(
            stage.executor,
            sampler,
            channel,
            rank=rank,
            size=size,
            drafter=stage.drafter,
            on_step=on_step,
            frame_timeout_s=frame_timeout_s,
            ranks=stage.ranks,
        )
        self._ranks = stage.ranks
        self._sampler = sampler
        self._channel = channel
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue(1024)
        self._formed = False
        self._stopping = False
        self.on_broken: Callable[[], object] = lambda: None
        self.on_connected: Callable[[Forming], object] = lambda forming: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def form(self, addresses: list[bytes], forming: Forming) -> None:
        """Connect the batch channel for a new forming of the pool. Any thread."""
        self._order(lambda: self._connect(addresses, forming))

    def leave(self) -> Future[None]:
        """The pool is broken: serve nothing until it is formed again. Done when the step that runs
        is over. Any thread."""
        left: Future[None] = Future()
        left.set_running_or_notify_cancel()  # a waiter cannot cancel it
        self._ranks.abandon()
        self._order(lambda: self._leave(left))
        return left

    def stop(self, timeout_s: float = 10) -> None:
        self._order(self._stop)
        self._thread.join(timeout_s)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put_nowait(order)
        self._channel.wake()

    def _connect(self, addresses: list[bytes], forming: Forming) -> None:
        self._channel.connect(addresses, forming)
        self._ranks.use(self._channel, self._channel.parts)
        self._sampler.reset()  # a new leader counts its requests anew
        self._formed = True
        self.on_connected(forming)

    def _leave(self, left: Future[None]) -> None:
        self._formed = False
        left.set_result(None)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            try:
                if not self._formed:
                    self._orders.get()()
                    continue
                self._follower.step(1.0)
                while not self._orders.empty():
                    self._orders.get_nowait()()
            except (PeerLostError, IntegrityError) as error:
                logger.warning("the pool broke: %s", error)
                self._break()
            except Exception:  # the edge of the thread: whatever it is, the pool must be notified
                logger.exception("stage step failed")
                self._break()

    def _break(self) -> None:
        self._formed = False
        self.on_broken()


class Follower:
    """Keeps the stage joined to its leader until cancelled. `reports` is what its transfer agent
    was built with."""

    def __init__(
        self,
        config: WorkerConfig,
        stage: Stage,
        engine: FollowerEngine,
        channel_address: bytes,
        security: ChannelSecurity,
        reports: JoinReports,
    ) -> None:
        self._config = config
        self._security = security
        self._stage = stage
        self._engine = engine
        self._channel_address = channel_address
        self._checks: set[asyncio.Task[None]] = set()
        self._reports = reports
        self._was_formed = False  # since the last try to join
        self._is_leaving = False
        # the highest that any leader gave; frames of it, or below, are old ones to a new pool
        self._pool_epoch = 0
        self._has_parted = asyncio.Event()

    async def leave(self, grace_s: float) -> None:
        """Serve on until the leader dismisses this stage, because nothing runs any more. Not longer
        than the grace, and not at all if the leader is gone."""
        self._is_leaving = True
        stream = self._reports.stream
        if stream is None or not stream.is_open:
            return
        logger.info("leaving: waiting for the leader to end the stream")
        stream.send(pb.JoinRequest(leaving=pb.Leaving(grace_s=grace_s)))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s + GOODBYE_S):
                await self._has_parted.wait()

    async def run(self, on_joined: Callable[[bool], None]) -> None:
        """Join, serve, rejoin, until cancelled. `on_joined` is called at each change of membership.

        Raises:
            DeadlineError: something of the time before may still touch the stage's memory. Only the
                end of the process can stop it.
        """
        events, delay = asyncio.get_running_loop(), REJOIN_MIN_S
        self._engine.on_broken = lambda: events.call_soon_threadsafe(self._drop)
        self._engine.on_connected = lambda forming: events.call_soon_threadsafe(
            self._report_ready, forming
        )
        options = ChannelOptions(max_reconnect_backoff_s=RECONNECT_S)
        async with open_channel(self._config.leader, options, security=self._security) as channel:
            while True:
                left = await self._join(channel, on_joined)
                renew(
                    channel
                )  # the leader that ended the stream need not be the one that has the name now
                if self._is_leaving:
                    await events.create_future()  # nowhere to go but out
                await self._settle(left)
                delay = REJOIN_MIN_S if self._was_formed else min(delay * 2, REJOIN_MAX_S)
                await asyncio.sleep(delay)

    async def _join(
        self, channel: grpc.aio.Channel, on_joined: Callable[[bool], None]
    ) -> Future[None]:
        """Wait for the leader, join it and serve until the stream ends. The result is done when the
        step that runs is over."""
        self._was_formed = False
        logger.info("joining the leader %s", self._config.leader)
        try:
            await self._reach(channel)
            join = pipeline_pb2_grpc.PipelineStub(channel).Join()
            async with JoinStream(join, self._hello()) as self._reports.stream:
                self._has_parted.clear()
                while (command := await self._reports.stream.receive()) is not None:
                    self._run_command(command, on_joined)
            logger.info("the leader %s closed the pool", self._config.leader)
        except grpc.aio.AioRpcError as error:
            why = reach_problem(error.details()) if is_lost(error) else error_from_rpc(error)
            logger.warning("no pool with leader %s: %s", self._config.leader, why)
        except BatonError as error:
            logger.warning("no pool with leader %s: %s", self._config.leader, error)
        except (
            Exception
        ):  # whatever it is, the next try begins anew; the end of this process would not help
            logger.exception(
                "the stream with leader %s met an error it does not know", self._config.leader
            )
        finally:
            left = self._part(on_joined)
        return left

    async def _reach(self, channel: grpc.aio.Channel) -> None:
        """Wait until the leader answers, and report from time to time why it does not."""
        health = health_pb2_grpc.HealthStub(channel)
        report_s = asyncio.get_running_loop().time() + REPORT_S
        while True:
            try:
                await health.Check(  # type: ignore[attr-defined]  # stubs lack it
                    health_pb2.HealthCheckRequest(), timeout=ANSWER_S
                )
                return
            except grpc.aio.AioRpcError as error:
                if not is_lost(error) and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    return  # that it is there is all
                if asyncio.get_running_loop().time() >= report_s:
                    report_s += REPORT_S
                    logger.warning(
                        "the leader %s cannot be reached: %s",
                        self._config.leader,
                        reach_problem(error.details()),
                    )
            await asyncio.sleep(RECONNECT_S)

    def _hello(self) -> pb.StageHello:
        return pb.StageHello(
            rank=self._config.rank,
            endpoint=codec.endpoint_to_proto(self._stage.agent.endpoint),
            channel_address=self._channel_address,
            settings=self._stage.plan.settings,
            weights=weights_to_proto(self._stage.weights),
            pool_epoch=self._pool_epoch,
        )

    def _run_command(self, command: pb.JoinResponse, on_joined: Callable[[bool], None]) -> None:
        match command.WhichOneof("command"):
            case "formed":
                forming = forming_from_proto(
                    command.formed,
                    rank=self._config.rank,
                    incarnation=self._stage.agent.incarnation,
                )
                self._pool_epoch = max(self._pool_epoch, forming.epoch)
                self._engine.form(list(command.formed.channel_addresses), forming)
                on_joined(True)  # noqa: FBT003
            case "open_session":
                source = codec.source_from_proto(command.open_session.source)
                destination = codec.destination_from_proto(command.open_session.destination)
                if command.open_session.HasField("request_key"):
                    self._stage.agent.open_send(
                        command.open_session.request_key, source, destination
                    )
                else:
                    self._stage.agent.open_receive(source, destination)
            case "close_session":
                if command.close_session.HasField("request_key"):
                    self._stage.agent.close_request(command.close_session.request_key)
                else:
                    self._stage.agent.close(command.close_session.session_id)
            case "check_grammar":
                task = asyncio.create_task(self._check_grammar(command.check_grammar))
                self._checks.add(task)
                task.add_done_callback(self._checks.discard)

    async def _check_grammar(self, command: pb.CheckGrammar) -> None:
        """Compile, and answer the leader that sent the grammar, if its stream is still open
        then."""
        stream, answer = self._reports.stream, pb.GrammarChecked(check_id=command.check_id)
        grammar, grammars = grammar_from_proto(command.grammar), self._stage.grammars
        try:
            if grammars is None or grammar is None:
                raise InvalidRequestError(FieldViolation("structured_output", NO_GRAMMARS))
            await grammars.check(grammar)
        except InvalidRequestError as error:
            answer.problem, answer.refused = error.violations[0].description, True
        except BatonError as error:
            answer.problem = str(error)
        if stream is not None:
            stream.send(pb.JoinRequest(grammar_checked=answer))

    def _report_ready(self, forming: Forming) -> None:
        """Tell the leader that this stage takes frames. One that has begun another forming ignores
        it."""
        if self._reports.stream is not None:
            self._reports.stream.send(pb.JoinRequest(ready=pb.StageReady(session=forming.session)))

    def _drop(self) -> None:
        """The engine has met an error: half-close the Join, whereupon the leader counts this stage
        as lost."""
        if self._reports.stream is not None:
            self._reports.stream.end()

    def _part(self, on_joined: Callable[[bool], None]) -> Future[None]:
        """Stop all that goes on; done when the step that runs is over."""
        self._reports.stream = None
        on_joined(False)  # noqa: FBT003
        self._has_parted.set()
        self._stage.agent.close_all()
        return self._engine.leave()

    async def _settle(self, left: Future[None]) -> None:
        """Wait until nothing of the time before can touch this stage's memory. Raises
        DeadlineError."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await asyncio.wrap_future(left)
                # Again: the step that ran until now has given the agent layers under keys that the
                #     next leader may use.
                await asyncio.wrap_future(self._stage.agent.close_all())
        except TimeoutError:
            raise DeadlineError(
                f"this stage cannot join again: a step or a transfer of the time before has not ended "
                f"after {SETTLE_S:g} s"
            ) from None
