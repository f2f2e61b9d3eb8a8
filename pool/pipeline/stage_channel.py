"""The batch channel of a pool: frames over UCX, and the choice of how tensors travel.

Each stage's address names its device. All stages see the same addresses when the pool forms, so
they choose the same way.
"""

import json
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

import torch
import torch.distributed

from engine.pipeline.channel import Packet
from engine.pipeline.links import MESSAGE_TIMEOUT_S, LinkBackend, P2PLinks
from engine.pipeline.rendezvous import Rendezvous, RendezvousHost
from engine.pipeline.tensor_channel import TensorChannel
from pool.pipeline.part_memory import PartMemory, share_a_host, this_host
from pool.stage.config import WorkerConfig
from pool.stage.transports import FrameLimits, StageFrames, make_stage_frames
from runtime.config import parse_address
from runtime.errors import ConfigError, PeerLostError
from transfer.transport.forming import Forming
from transfer.transport.refusals import RefusalReason

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
MAX_ADDRESS_BYTES = 1 << 16
RefusalCounts = Callable[[str], Callable[[RefusalReason], object]]  # by channel name
FRAME_OVERHEAD = 1 << 12  # header and table of the tensors


@dataclass(frozen=True)
class StageAddress:
    """The address by which its neighbors reach a stage.

    links        backend that can move its tensors outside the frames; empty if there is none
    why          reason for empty `links`
    is_demanded  whether the pool must not form without links
    port, token  stage 0's rendezvous
    memory       shared memory for the ranks of its stage, if it has any
    """

    rank: int
    frames: bytes
    links: str = ""
    device_id: str = ""
    why: str = ""
    is_demanded: bool = False
    port: int = 0
    token: str = ""
    memory: str = ""

    def pack(self) -> bytes:
        """Return the address as bytes: length, JSON, the frame channel's address."""
        values = asdict(self)
        del values["frames"]
        text = json.dumps(values).encode()
        return _LENGTH.pack(len(text)) + text + self.frames

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the address from its bytes.

        Raises:
            PeerLostError: `pack` did not make them.
        """
        try:
            (length,) = _LENGTH.unpack_from(data, 0)
            end = _LENGTH.size + length
            if end > min(len(data), MAX_ADDRESS_BYTES):
                raise ValueError(f"{length} bytes of JSON")
            made = cls(frames=data[end:], **json.loads(data[_LENGTH.size : end]))
            for field in fields(made):
                if type(getattr(made, field.name)) is not type(getattr(_ANY_ADDRESS, field.name)):
                    raise TypeError(f"{field.name} is not of its type")
            return made
        except (struct.error, ValueError, TypeError, RecursionError) as error:
            raise PeerLostError(f"{len(data)} bytes are not the address of a stage") from error


_ANY_ADDRESS = StageAddress(0, b"")


@dataclass(frozen=True)
class Choice:
    """The backend whose links tensors travel by; empty: within the frames."""

    links: str
    reason: str


def choose(stages: Sequence[StageAddress]) -> Choice:
    """Choose links from the addresses of the stages, in rank order.

    Raises:
        ConfigError: links are demanded but not possible.
    """
    choice = _choose(stages)
    demanding = [stage for stage in stages if stage.is_demanded]
    if demanding and not choice.links:
        raise ConfigError(
            f"stage {demanding[0].rank} demands stage_channel nccl, but {choice.reason}",
            field="stage_channel",
        )
    return choice


def check_channels(addresses: Sequence[bytes]) -> None:
    """Check that the joined stages, in rank order, can form one pool.

    Raises:
        ConfigError: links are demanded but not possible.
    """
    choose([StageAddress.unpack(address) for address in addresses])


def _choose(stages: Sequence[StageAddress]) -> Choice:
    owners: dict[str, int] = {}
    for stage in stages:
        if not stage.links:
            return Choice("", f"stage {stage.rank} {stage.why}")
        if stage.links != stages[0].links:
            return Choice(
                "",
                f"stage {stage.rank} has {stage.links}, stage {stages[0].rank} {stages[0].links}",
            )
        owner = owners.setdefault(stage.device_id, stage.rank)
        if owner != stage.rank:
            return Choice("", f"stages {owner} and {stage.rank} share device {stage.device_id}")
    return Choice(stages[0].links, "every stage has a device of its own")


class PoolChannel:
    """A `StageChannel` that can be formed repeatedly.

    Belongs to the engine thread, except for `wake`, `fail` and `address`.
    """

    def __init__(
        self,
        frames: StageFrames,
        *,
        rank: int,
        max_bytes: int,
        backend: LinkBackend | None = None,
        why: str = "",
        is_demanded: bool = False,
        leader_host: str = "127.0.0.1",
        ports: tuple[int, int] | None = None,
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
        memory: PartMemory | None = None,
        on_sent: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """Create the channel of a stage; stage 0 listens at `leader_host` for links.

        `backend` makes links; without one, `why` is the reason. The ranks of a stage exchange parts
        through `memory` if all of them have one on this host.

        Raises:
            ConfigError: it cannot listen.
        """
        self._frames = frames
        self._memory = memory
        self.parts: PartMemory | None = None
        """The memory, while the ranks of the stage exchange parts through it."""
        self._rank = rank
        self._backend = backend
        self._leader_host = leader_host
        self._channel = TensorChannel(
            frames, max_bytes=max_bytes, message_timeout_s=message_timeout_s, on_sent=on_sent
        )
        self._rendezvous = (
            RendezvousHost(leader_host, ports) if backend is not None and rank == 0 else None
        )
        address = StageAddress(
            rank,
            frames.address,
            why=why,
            is_demanded=is_demanded,
            memory="" if memory is None else memory.address,
        )
        if backend is not None:
            address = replace(address, links=backend.name, device_id=backend.device_id)
        if self._rendezvous is not None:
            address = replace(
                address, port=self._rendezvous.place.port, token=self._rendezvous.place.token
            )
        self.address = address.pack()

    def connect(self, addresses: Sequence[bytes], forming: Forming) -> None:
        """Form the pool and end the previous forming.

        `addresses` are those of all stages by rank, including this one.

        Raises:
            PeerLostError: an address is not usable here.
            ConfigError: links are demanded but not possible.
            InternalError: the epoch is not newer than the current one.
        """
        stages = [StageAddress.unpack(address) for address in addresses]
        choice = choose(stages)
        self._frames.connect([stage.frames for stage in stages], forming)
        links = None
        if choice.links and self._backend is not None:
            place = (
                self._rendezvous.place
                if self._rendezvous is not None
                else Rendezvous(self._leader_host, stages[0].port, stages[0].token)
            )
            links = P2PLinks(
                self._backend, place, room=forming.room, rank=self._rank, size=len(stages)
            )
        self._channel.use(links)
        self.parts = self._connected_memory([stage.memory for stage in stages], forming)
        logger.info(
            "tensors go to the next stage %s: %s",
            f"outside their frames, by {choice.links}"
            if choice.links
            else "within their frames, over UCX",
            choice.reason,
        )

    def _connected_memory(self, addresses: list[str], forming: Forming) -> PartMemory | None:
        if self._memory is None:
            return None
        own = addresses[self._memory.first : self._memory.first + self._memory.size]
        if not share_a_host(own):
            logger.info(
                "the ranks of the stage exchange partial results over UCX: they do not share a host"
            )
            return None
        self._memory.connect(own, forming)
        return self._memory

    def fail(self, rank: int, reason: str) -> None:
        """End waits for this lost stage with PeerLostError. Any thread."""
        self._frames.fail(rank, reason)

    def send(self, rank: int, packet: Packet, *, timeout_s: float) -> None:
        self._channel.send(rank, packet, timeout_s=timeout_s)

    def receive(self, rank: int, *, timeout_s: float) -> Packet | None:
        return self._channel.receive(rank, timeout_s=timeout_s)

    def wake(self) -> None:
        self._channel.wake()

    def close(self) -> None:
        self._channel.close()
        if self._memory is not None:
            self._memory.close()


def open_pool_channel(
    config: WorkerConfig,
    device: torch.device,
    *,
    max_bytes: int,
    on_sent: Callable[[int], object],
    count_refused: RefusalCounts = lambda channel: lambda reason: None,
) -> PoolChannel:
    """Open the channel of this stage, which computes on `device`.

    `count_refused` returns the counter of rejected frames or parts.

    Raises:
        ConfigError: UCX does not work here, or NCCL is demanded and this stage cannot use it.
    """
    backend, why = _link_backend(config, device)
    limits = FrameLimits(max_bytes + FRAME_OVERHEAD, on_sent, count_refused("frames"))
    frames = make_stage_frames(config, limits)
    memory = None
    if config.tp > 1 and config.transport != "tcp" and this_host():
        memory = PartMemory(
            this_host(),
            rank=config.rank,
            size=config.tp,
            check=frames.check,
            on_sent=on_sent,
            on_refused=count_refused("parts"),
        )
    host = parse_address(config.listen if config.rank == 0 else config.leader).host
    return PoolChannel(
        frames,
        rank=config.rank,
        max_bytes=max_bytes,
        backend=backend,
        why=why,
        is_demanded=config.stage_channel == "nccl",
        leader_host=host,
        ports=config.binding.ports,
        message_timeout_s=max(MESSAGE_TIMEOUT_S, config.frame_timeout_s),
        memory=memory,
        on_sent=on_sent,
    )


def _link_backend(config: WorkerConfig, device: torch.device) -> tuple[LinkBackend | None, str]:
    """Return the backend for tensors outside the frames, or None and the reason."""
    if config.stage_channel == "ucx":
        return None, "is set to use UCX (--stage-channel)"
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        why = (
            f"computes on {device.type}"
            if device.type != "cuda"
            else f"has torch {torch.__version__} without NCCL"
        )
        if config.stage_channel == "nccl":
            raise ConfigError(
                f"stage_channel nccl needs a CUDA device and NCCL, this stage {why}",
                field="stage_channel",
            )
        return None, why
    from engine.pipeline.nccl_link import NcclBackend  # the import fails if torch has no NCCL

    index = torch.cuda.current_device() if device == torch.device("cuda") else device.index
    return NcclBackend(torch.device("cuda", index)), ""
