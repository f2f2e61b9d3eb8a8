"""One flipped bit between two stages: the pool breaks, its requests can be sent again, and no wrong
token comes out."""

from dataclasses import dataclass

import pytest

from engine.core.batch import ForwardMode
from engine.core.layer_range import LayerRange
from engine.core.request import Request, SamplingParams
from engine.core.rows import Row, build_batch
from engine.pipeline.records import pack_result
from engine.pipeline.stages import HeadStage
from engine.pipeline.tensor_channel import TensorChannel
from runtime.errors import IntegrityError, PeerLostError
from testing.inprocess_channel import InProcessChannel
from tests.support.models.tiny_models import QWEN3, tiny
from tests.support.pool.formings import forming_of
from tests.support.pool.local_pool import build_executor, local_pool
from transfer.transport.forming import HEAD_BYTES, FrameSeals

REQUEST = Request("r", (1, 2, 3, 4), 8, SamplingParams(temperature=0))


@dataclass
class NoisyChannel:
    """A frame channel that authenticates as that between processes does, and flips one bit of the
    `damaged`-th frame it sends; -1: of none."""

    inner: InProcessChannel
    seals: FrameSeals
    damaged: int
    bit: int
    num_sent: int = 0
    head_bytes = HEAD_BYTES

    def send(self, rank: int, frame: bytearray, *, timeout_s: float) -> None:
        self.seals.seal(rank, frame)
        if self.num_sent == self.damaged:
            frame = bytearray(frame)
            frame[self.bit // 8 % len(frame)] ^= 1 << self.bit % 8
        self.num_sent += 1
        self.inner.send(rank, frame, timeout_s=timeout_s)

    def receive(self, rank: int, *, timeout_s: float) -> memoryview | None:
        frame = self.inner.receive(rank, timeout_s=timeout_s)
        if frame is None:
            return None
        if reason := self.seals.open(rank, frame):
            raise IntegrityError(f"a {reason} frame of stage {rank}")
        return frame[HEAD_BYTES:]

    def check(self, rank: int) -> None:
        self.inner.check(rank)

    def fail(self, rank: int, reason: str) -> None:
        self.inner.fail(rank, reason)

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        self.inner.close()


def noisy(sender: int, damaged: int, bit: int) -> list[NoisyChannel]:
    return [
        NoisyChannel(
            channel, FrameSeals(forming_of(1, 2), rank), damaged if rank == sender else -1, bit
        )
        for rank, channel in enumerate(InProcessChannel.pool(2))
    ]


@pytest.mark.parametrize("bit", [3, 75, 250, 2000, 2900, -1], ids=str)
@pytest.mark.parametrize("sender", [0, 1])
def test_a_flipped_bit_gives_no_wrong_token_and_a_retryable_error(sender: int, bit: int) -> None:
    description = tiny(QWEN3)
    with local_pool(description, 2) as pool:
        (expected,) = pool.generate([REQUEST])
    with local_pool(description, 2, connected=lambda size: noisy(sender, 3, bit)) as pool:
        (answer,) = pool.generate([REQUEST])
    assert answer.failed is not None
    assert isinstance(answer.failed.error, PeerLostError), (
        "the router replays what a lost pool leaves behind"
    )
    assert [token.token_id for token in answer.tokens] == [
        token.token_id for token in expected.tokens
    ][:3]


def test_a_result_that_is_missing_or_comes_twice_is_noticed() -> None:
    frames = InProcessChannel.pool(2)
    head, last = (TensorChannel(channel, max_bytes=1 << 20) for channel in frames)
    executor, _ = build_executor(
        tiny(QWEN3), LayerRange(0, 1), page_size=16, num_pages=4, num_slots=0
    )
    stage = HeadStage(executor, head, size=2)
    stage.launch((build_batch(ForwardMode.PREFILL, [Row(1, [1], 0, [1], 0, None)]),))
    packet = last.receive(0, timeout_s=1.0)
    assert packet is not None
    last.send(0, pack_result(packet.sequence + 1, []), timeout_s=1.0)
    with pytest.raises(
        IntegrityError,
        match=rf"the result of batch \d+, but that of batch {packet.sequence} is due",
    ):
        stage.collect(1.0)
