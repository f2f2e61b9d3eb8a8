"""The transports of a pool, by their names in the settings. Only this module names UCX.

A transport moves the pages of handoffs (`transfer.transport.protocol.Transport`) and the frames
between the stages of a pool (`StageFrames`). Its library is loaded when one of them is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.pipeline.channel import FrameChannel
from runtime.clock import SystemClock
from transfer.transport.binding import NetworkBinding
from transfer.transport.forming import Forming
from transfer.transport.protocol import Transport
from transfer.transport.refusals import RefusalReason

OnRefused = Callable[[RefusalReason], object]


class StageFrames(FrameChannel, Protocol):
    """Authenticated frames between the stages of a pool, which form it again and again."""

    address: bytes

    def connect(self, addresses: Sequence[bytes], forming: Forming) -> None:
        """Connect to the stages at these addresses, by rank, under the keys of `forming`."""
        ...


class TransportSettings(Protocol):
    """The settings that a transport depends on."""

    @property
    def transport(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def binding(self) -> NetworkBinding: ...


@dataclass(frozen=True)
class FrameLimits:
    """The largest frame in bytes, and the counters of sent bytes and of rejected frames."""

    max_frame_bytes: int
    on_sent: Callable[[int], object] = lambda num_bytes: None
    on_refused: OnRefused = lambda reason: None


@dataclass(frozen=True)
class TransportKind:
    """How to make one kind of transport.

    `reaches_devices`: messages may be in the memory of a CUDA device.
    """

    make: Callable[[TransportSettings, OnRefused], Transport]
    make_frames: Callable[[TransportSettings, FrameLimits], StageFrames]
    reaches_devices: bool = False


def _ucx_transport(settings: TransportSettings, on_refused: OnRefused) -> Transport:
    from transfer.ucx import transport as ucx
    from transfer.ucx.settings import TransportProfile

    return ucx.UcxTransport(
        profile=TransportProfile(settings.transport),
        clock=SystemClock(),
        binding=settings.binding,
        on_refused=on_refused,
    )


def _ucx_frames(settings: TransportSettings, limits: FrameLimits) -> StageFrames:
    from transfer.ucx import stage_channel as ucx
    from transfer.ucx.settings import TransportProfile

    return ucx.UcxStageChannel(
        rank=settings.rank,
        max_frame_bytes=limits.max_frame_bytes,
        profile=TransportProfile(settings.transport),
        binding=settings.binding,
        on_sent=limits.on_sent,
        on_refused=limits.on_refused,
    )


# By the value of the setting `transport`. For UCX these are the names of its profiles.
TRANSPORTS: Mapping[str, TransportKind] = {
    "auto": TransportKind(_ucx_transport, _ucx_frames),
    "shm": TransportKind(_ucx_transport, _ucx_frames),
    "tcp": TransportKind(_ucx_transport, _ucx_frames),
    "cuda": TransportKind(_ucx_transport, _ucx_frames, reaches_devices=True),
}


def make_transport(
    settings: TransportSettings, on_refused: OnRefused = lambda reason: None
) -> Transport:
    """Make the transport of handoffs; `on_refused` gets the reason of each rejected message.

    Raises:
        ConfigError: the transport cannot work here.
    """
    return TRANSPORTS[settings.transport].make(settings, on_refused)


def make_stage_frames(settings: TransportSettings, limits: FrameLimits) -> StageFrames:
    """Make the channel of frames between the stages of a pool.

    Raises:
        ConfigError: the transport cannot work here.
    """
    return TRANSPORTS[settings.transport].make_frames(settings, limits)


def preload() -> None:
    """Load the libraries of all transports, in a process that will be forked."""
    from transfer.ucx.api import load_ucx

    load_ucx()
