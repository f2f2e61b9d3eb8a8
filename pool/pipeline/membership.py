"""Membership of a pool: stages 1..n-1 join stage 0 and stay joined while their Join stream is open.

A stage that ranks share consists of as many processes, each of which joins separately. "Rank" is
here a process's number in the pool, counted stage by stage.

The leader's side is `PipelineService`. A pool is *formed* when every rank has joined with the
expected layers. Each forming gets its own key and a new epoch, above those that any of its stages
has seen. Every stage then reconnects its batch channel and reports ready. When all are ready, the
leader begins to send. A lost stage breaks the pool until it, or its successor, joins.

The follower's side is `pool.pipeline.join`.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from google.protobuf.message import Message

from engine.core.layer_range import LayerRange, Placement
from models.weights_digest import StageDigests, check_copies
from pool.pipeline.forming import FormingAnswers, forming_to_proto, new_forming
from protos import pipeline_pb2 as pb
from protos import pipeline_pb2_grpc
from runtime.errors import ConfigError, FieldViolation, IncompatiblePeerError, InvalidRequestError
from runtime.rpc.read_limits import first_message
from transfer.plan import codec
from transfer.plan.compatibility import check_settings
from transfer.plan.handoff_terms import StageEndpoint, StageSessionEvent
from transfer.transport.forming import Forming

JoinContext = grpc.aio.ServicerContext[pb.JoinRequest, pb.JoinResponse]
HELLO_TIMEOUT_S = 10.0
OUTBOX_LIMIT = 65536  # commands of the leader for one stage
_DIGEST = re.compile(r"[0-9a-f]{32}")
MAX_EPOCH = 1 << 47  # out of reach for real formings
READY_TIMEOUT_S = 30.0  # seconds to connect a channel, which waits for nothing

logger = logging.getLogger(__name__)


@dataclass
class StageLink:
    """A joined stage: the facts it reported, and the queue of commands to it.

    No command to a joined stage is lost. If the queue of unread commands is full, the stage is lost
    instead, and nothing touches its memory before it has joined again.
    """

    rank: int
    endpoint: StageEndpoint
    channel_address: bytes
    weights: StageDigests
    window: asyncio.Queue[pb.JoinResponse | None] = field(
        default_factory=lambda: asyncio.Queue(OUTBOX_LIMIT)
    )
    on_overflow: Callable[[], object] = lambda: None

    def send(self, **command: Message) -> None:
        """Queue one command without failing; a stage that leaves thousands unread is lost."""
        self._put(pb.JoinResponse(**command))  # type: ignore[arg-type]

    def dismiss(self) -> None:
        """End the stage's stream after the commands queued so far."""
        self._put(None)

    def wake(self) -> None:
        """Wake the handler, which then checks whether the stream continues."""
        self._put(None)

    def _put(self, command: pb.JoinResponse | None) -> None:
        try:
            self.window.put_nowait(command)
        except asyncio.QueueFull:
            self.on_overflow()


class MembershipObserver(Protocol):
    """The leader's reactions to changes of the pool. Called on the event loop's thread."""

    def pool_formed(self, forming: Forming, links: list[StageLink]) -> None:
        """Connect; nothing may be sent to another member yet."""
        ...

    def pool_ready(self, forming: Forming) -> None:
        """Begin to send: every other member is connected."""
        ...

    def stage_lost(self, rank: int) -> None: ...

    def stage_event(self, rank: int, event: StageSessionEvent) -> None: ...

    def stage_answered(self, rank: int, answer: pb.JoinRequest) -> None:
        """Take the answer to a question of the leader."""
        ...

    def stage_leaving(self, link: StageLink, grace_s: float) -> None:
        """Dismiss the stage when no requests run any more, at the latest after the grace."""
        ...


class PipelineService(pipeline_pb2_grpc.PipelineServicer):
    """The Join service of a leader.

    layers       the layers that each stage must own
    tensor_size  the number of ranks that share a stage, in `data_size` groups
    settings     the settings that all stages must share
    counted      digests of tensors that other stages may have copies of
    weights      the digests of the leader's own weights
    """

    def __init__(
        self,
        *,
        layers: list[LayerRange],
        settings: Mapping[str, str],
        counted: Mapping[str, str],
        leader_channel: bytes,
        incarnation: str,
        tensor_size: int = 1,
        data_size: int = 1,
        weights: StageDigests | None = None,
        observer: MembershipObserver,
        check_channels: Callable[[Sequence[bytes]], object],
    ) -> None:
        """Create the service; `incarnation` is the leader's own.

        `check_channels` raises ConfigError for channel addresses, in rank order, that cannot form a
        pool.
        """
        self._places = [
            Placement.of(rank, len(layers) * tensor_size, tensor_size, data_size)
            for rank in range(len(layers) * tensor_size)
        ]
        self._layers = [layers[place.pipeline_rank] for place in self._places]
        self._weights = weights
        self._settings = settings
        self._counted = counted
        self._leader_channel = leader_channel
        self._incarnation = incarnation
        self._observer = observer
        self._check_channels = check_channels
        self._links: dict[int, StageLink] = {}
        self._answers = FormingAnswers()
        self._forming: Forming | None = None  # the latest
        # The highest epoch that this leader has used or seen; stages remember those of earlier
        # leaders.
        self._epoch = 0

    @property
    def missing_ranks(self) -> list[int]:
        return [rank for rank in range(1, len(self._layers)) if rank not in self._links]

    async def Join(
        self, request_iterator: AsyncIterator[pb.JoinRequest], context: JoinContext
    ) -> AsyncIterator[pb.JoinResponse]:
        link = self._welcome(await first_message(request_iterator, HELLO_TIMEOUT_S))
        handler = asyncio.current_task()
        assert handler is not None
        link.on_overflow = handler.cancel  # it waits for the stage to read
        reader = asyncio.create_task(self._read(link, request_iterator))
        reader.add_done_callback(lambda ended: link.wake())
        try:
            while not reader.done() and (response := await link.window.get()) is not None:
                yield response
        finally:
            reader.cancel()
            self._lose(link)

    async def _read(self, link: StageLink, requests: AsyncIterator[pb.JoinRequest]) -> None:
        async for request in requests:
            if self._links.get(link.rank) is not link:
                return
            match request.WhichOneof("event"):
                case "session":
                    self._observer.stage_event(link.rank, codec.event_from_proto(request.session))
                case "leaving":
                    self._observer.stage_leaving(link, request.leaving.grace_s)
                case "ready":
                    self._ready(link.rank, request.ready.session)
                case "grammar_checked" | "adapters_held" | "blocks_moved":
                    self._observer.stage_answered(link.rank, request)

    def _welcome(self, request: pb.JoinRequest) -> StageLink:
        hello = request.hello
        endpoint = codec.endpoint_from_proto(hello.endpoint)
        if not 1 <= hello.rank < len(self._layers):
            raise ConfigError(
                f"rank {hello.rank} is outside 1..{len(self._layers) - 1} of this pool",
                field="rank",
            )
        # Checked first, because other settings give other layers.
        check_settings(self._settings, hello.settings)
        if endpoint.layers != self._layers[hello.rank]:
            raise ConfigError(
                f"rank {hello.rank} owns layers {endpoint.layers}, this pool's partition gives it "
                f"{self._layers[hello.rank]}",
                field="partition",
            )
        own = self._places[hello.rank].tensor.attention
        if endpoint.tensor != own:
            raise ConfigError(
                f"rank {hello.rank} has part {endpoint.tensor.rank} of {endpoint.tensor.size} of its "
                f"stage, this pool gives it part {own.rank}",
                field="tp",
            )
        weights = weights_from_proto(hello.weights)
        check_copies(self._counted, weights.copies, stage=hello.rank)
        self._check_alike(hello.rank, weights)
        others = {
            rank: link.channel_address for rank, link in self._links.items() if rank != hello.rank
        }
        joined = sorted(
            {0: self._leader_channel, **others, hello.rank: hello.channel_address}.items()
        )
        self._check_channels([address for _, address in joined])
        if hello.pool_epoch > MAX_EPOCH:
            raise ConfigError(
                f"pool_epoch must be at most {MAX_EPOCH}, got {hello.pool_epoch}",
                field="pool_epoch",
            )
        self._epoch = max(self._epoch, hello.pool_epoch)
        previous = self._links.pop(hello.rank, None)
        if previous is not None:
            self._answers.end()
            self._observer.stage_lost(hello.rank)
        link = StageLink(hello.rank, endpoint, hello.channel_address, weights)
        self._links[hello.rank] = link
        logger.info("%s joined with layers %s", self._places[hello.rank], endpoint.layers)
        if not self.missing_ranks:
            self._form()
        return link

    def _check_alike(self, rank: int, weights: StageDigests) -> None:
        """Check that the ranks of a stage have read the same weights, byte for byte.

        Raises:
            IncompatiblePeerError: they have not.
        """
        stage = self._places[rank].pipeline_rank
        others = {other: link.weights for other, link in self._links.items() if other != rank}
        if self._weights is not None:
            others[0] = self._weights
        for other, known in sorted(others.items()):
            if self._places[other].pipeline_rank == stage and known.total != weights.total:
                raise IncompatiblePeerError(
                    f"rank {rank} has read other weights than rank {other}, which shares stage "
                    f"{stage} with it: digest {weights.total} there, {known.total} here"
                )

    def _form(self) -> None:
        self._epoch += 1
        links = [self._links[rank] for rank in range(1, len(self._layers))]
        addresses = [self._leader_channel, *(link.channel_address for link in links)]
        forming = new_forming(
            self._epoch, [self._incarnation, *(link.endpoint.incarnation for link in links)]
        )
        self._forming = forming
        self._answers.begin(forming)
        for link in links:
            link.send(formed=forming_to_proto(forming, addresses))
        asyncio.get_running_loop().call_later(READY_TIMEOUT_S, self._dismiss_late, forming)
        self._observer.pool_formed(forming, links)

    def _ready(self, rank: int, session: int) -> None:
        if self._answers.is_ready(rank, session) and self._forming is not None:
            self._observer.pool_ready(self._forming)

    def _dismiss_late(self, forming: Forming) -> None:
        """Dismiss members that have not connected, so that the pool does not wait forever."""
        for rank in self._answers.late(forming):
            logger.warning(
                "%s has not connected within %g s and must join again",
                self._places[rank],
                READY_TIMEOUT_S,
            )
            self._links[rank].dismiss()

    def _lose(self, link: StageLink) -> None:
        if self._links.get(link.rank) is link:
            del self._links[link.rank]
            self._answers.end()
            self._observer.stage_lost(link.rank)


def weights_to_proto(weights: StageDigests) -> pb.StageWeights:
    return pb.StageWeights(
        total=weights.total, copies=weights.copies, draft_total=weights.draft_total
    )


def weights_from_proto(message: pb.StageWeights) -> StageDigests:
    """Return the digests of a message.

    Raises:
        InvalidRequestError: one is not a digest.
    """
    for name, value in (
        ("total", message.total),
        ("draft_total", message.draft_total or message.total),
    ):
        if not _DIGEST.fullmatch(value):
            raise InvalidRequestError(
                FieldViolation(f"hello.weights.{name}", "must be 32 hexadecimal digits")
            )
    return StageDigests(message.total, dict(message.copies), message.draft_total)
