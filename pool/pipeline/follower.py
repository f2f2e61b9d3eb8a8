"""A follower, of rank 1..n-1: joins the leader, serves its stage, and joins again after a loss.

The engine thread owns the batch channel and the model, and the event loop's thread owns the Join
stream. The stream shows that the leader is alive. When it drops, every session is closed and the
batch channel is left. The stage joins again as soon as a leader is reachable, or after a pause if
one refuses. The leader's name is resolved again each time. After an engine error the stage drops
the stream itself, because its leader may not notice. A stage that stops reports it on the stream
and serves until its leader ends the stream.

It joins again only when nothing from before can touch its memory: the running step is over and
every transfer has drained. The leader relies on that (`pool.pipeline.group`), because it has leased
those pages to other requests.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pool.pipeline.adapters import AdaptersOfFollower
from pool.pipeline.follower_engine import FollowerEngine
from pool.pipeline.forming import forming_from_proto
from pool.pipeline.grammars import NO_GRAMMARS, grammar_from_proto
from pool.pipeline.join import JoinReports, JoinStream
from pool.pipeline.membership import weights_to_proto
from pool.pipeline.tiers import answer_blocks, settle
from pool.stage.config import WorkerConfig
from pool.stage.stage import Stage
from protos import pipeline_pb2 as pb
from protos import pipeline_pb2_grpc
from runtime.errors import (
    BatonError,
    DeadlineError,
    FieldViolation,
    InvalidRequestError,
)
from runtime.rpc.client import ChannelOptions, open_channel
from runtime.rpc.redial import renew
from runtime.rpc.status import error_from_rpc, is_lost
from runtime.rpc.unreachable import reach_problem
from runtime.security.access import ChannelSecurity
from transfer.plan import codec
from transfer.transport.forming import Forming

# Seconds between two tries; the longer pauses are for a leader that refuses.
REJOIN_MIN_S = 0.1
REJOIN_MAX_S = 2.0
# Seconds between two checks for the leader; a reachable leader delays nothing longer.
RECONNECT_S = 0.25
ANSWER_S = 4.0  # seconds for a reachable leader to respond
REPORT_S = 10.0  # seconds between two warnings that it is not reachable
SETTLE_S = 60.0  # seconds for the longest step; transfers are cut much earlier
GOODBYE_S = 3.0  # seconds beyond the grace in which the leader hands requests back

logger = logging.getLogger(__name__)


class Follower:
    """The membership of a stage: keeps it joined to its leader until cancelled.

    `reports` is the port with which its transfer agent was built.
    """

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
        self._answers: set[asyncio.Task[None]] = set()
        self._adapters = AdaptersOfFollower(stage.adapters, engine.submit)
        self._reports = reports
        self._was_formed = False  # since the last try to join
        self._is_leaving = False
        # The highest epoch of any leader; a new pool rejects frames of it and below as old.
        self._pool_epoch = 0
        self._has_parted = asyncio.Event()

    async def leave(self, grace_s: float) -> None:
        """Serve until the leader dismisses this stage, because no requests run any more.

        Waits no longer than `grace_s`, and not at all if the leader is lost.
        """
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
        """Join, serve and rejoin until cancelled; call `on_joined` at each change of membership.

        Raises:
            DeadlineError: a step or transfer from before may still touch the stage's memory. Only
                the end of the process can stop it.
        """
        events = asyncio.get_running_loop()
        delay = REJOIN_MIN_S
        self._engine.on_broken = lambda: events.call_soon_threadsafe(self._drop)
        self._engine.on_connected = lambda forming: events.call_soon_threadsafe(
            self._report_ready, forming
        )
        options = ChannelOptions(max_reconnect_backoff_s=RECONNECT_S)
        async with open_channel(self._config.leader, options, security=self._security) as channel:
            while True:
                left = await self._join(channel, on_joined)
                # The name may now belong to another leader than the one that ended the stream.
                renew(channel)
                if self._is_leaving:
                    # Blocks until cancelled: the process is shutting down.
                    await events.create_future()
                await self._settle(left)
                delay = REJOIN_MIN_S if self._was_formed else min(delay * 2, REJOIN_MAX_S)
                await asyncio.sleep(delay)

    async def _join(
        self, channel: grpc.aio.Channel, on_joined: Callable[[bool], None]
    ) -> Future[None]:
        """Wait for the leader, join it and serve until the stream ends.

        Return a future that is done when the running step is over.
        """
        self._was_formed = False
        logger.info("joining the leader %s", self._config.leader)
        # The next try starts over, and ending this process would not help.
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
        except Exception:
            logger.exception("unexpected error in the stream with leader %s", self._config.leader)
        finally:
            left = self._part(on_joined)
        return left

    async def _reach(self, channel: grpc.aio.Channel) -> None:
        """Wait until the leader is reachable, and log from time to time why it is not."""
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
                    return  # any response shows that it is reachable
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
                if command.open_session.is_cached:
                    self._stage.agent.send_cached(source, destination)
                elif command.open_session.HasField("request_key"):
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
                self._start(self._check_grammar(command.check_grammar))
            case "hold_adapters":
                self._start(self._hold_adapters(command.hold_adapters))
            case "move_blocks" | "find_blocks":
                self._start(self._answer_blocks(command))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _check_grammar(self, command: pb.CheckGrammar) -> None:
        """Compile a grammar; send the result if the stream of the asking leader is still open."""
        stream = self._reports.stream
        answer = pb.GrammarChecked(check_id=command.check_id)
        grammar = grammar_from_proto(command.grammar)
        grammars = self._stage.grammars
        try:
            if grammars is None or grammar is None:
                raise InvalidRequestError(FieldViolation("structured_output", NO_GRAMMARS))
            await grammars.check(grammar)
        except InvalidRequestError as error:
            answer.problem = error.violations[0].description
            answer.refused = True
        except BatonError as error:
            answer.problem = str(error)
        if stream is not None:
            stream.send(pb.JoinRequest(grammar_checked=answer))

    async def _hold_adapters(self, command: pb.HoldAdapters) -> None:
        """Load and drop adapters; answer if the stream of the asking leader is still open."""
        stream = self._reports.stream
        answer = await self._adapters.hold(command)
        if stream is not None:
            stream.send(pb.JoinRequest(adapters_held=answer))

    async def _answer_blocks(self, command: pb.JoinResponse) -> None:
        """Move or find blocks; answer if the stream of the asking leader is still open."""
        stream = self._reports.stream
        answer = await answer_blocks(self._stage.tiers.blocks, command)
        if stream is not None:
            stream.send(pb.JoinRequest(blocks_moved=answer))

    def _report_ready(self, forming: Forming) -> None:
        """Report to the leader that this stage takes frames of a forming."""
        if self._reports.stream is not None:
            self._reports.stream.send(pb.JoinRequest(ready=pb.StageReady(session=forming.session)))

    def _drop(self) -> None:
        """Half-close the Join after an engine error, so that the leader counts the stage as lost."""
        if self._reports.stream is not None:
            self._reports.stream.end()

    def _part(self, on_joined: Callable[[bool], None]) -> Future[None]:
        """Stop all activity; return a future that is done when the running step is over."""
        self._reports.stream = None
        on_joined(False)  # noqa: FBT003
        self._has_parted.set()
        self._stage.agent.close_all()
        return self._engine.leave()

    async def _settle(self, left: Future[None]) -> None:
        """Wait until nothing from before can touch this stage's memory.

        Raises:
            DeadlineError: a step or transfer did not end in time.
        """
        try:
            async with asyncio.timeout(SETTLE_S):
                await asyncio.wrap_future(left)
                await settle(self._stage.tiers.blocks)
                # Close again: the step that just ended has reported layers under keys that the next
                # leader may reuse.
                await asyncio.wrap_future(self._stage.agent.close_all())
        except TimeoutError:
            raise DeadlineError(
                f"this stage cannot join again: an earlier step or transfer has not ended "
                f"after {SETTLE_S:g} s"
            ) from None
