"""Tensors from stage to stage on real devices: by NCCL where each stage has one, within the frames
where they share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from engine.pipeline.channel import Packet
from pool.pipeline.stage_channel import PoolChannel, open_pool_channel
from pool.stage.config import WorkerConfig
from runtime.errors import PeerLostError
from tests.support.pool.formings import forming_of

pytestmark = pytest.mark.usefixtures("ucx")
LIMIT = 64 << 20
LEADER = "127.0.0.1:7000"


@contextmanager
def pool(devices: list[torch.device]) -> Iterator[list[PoolChannel]]:
    configs = [
        WorkerConfig.model_validate({"model": ".", "rank": rank, "world_size": 2, "leader": LEADER})
        for rank in range(2)
    ]
    channels = [
        open_pool_channel(config, device, max_bytes=LIMIT, on_sent=lambda num_bytes: None)
        for config, device in zip(configs, devices, strict=True)
    ]
    for channel in channels:
        channel.connect([channel.address for channel in channels], forming_of(1, 2))
    yield channels
    for channel in channels:
        channel.close()


def received(channel: PoolChannel) -> tuple[torch.Tensor, ...]:
    packet = channel.receive(0, timeout_s=60.0)
    assert packet is not None
    return packet.tensors


def pass_tensors(devices: list[torch.device]) -> list[torch.device]:
    """Return the values that arrived, each in its turn, though all were sent from the same
    memory."""
    hidden = torch.empty(512, 4096, dtype=torch.bfloat16, device=devices[0])
    with pool(devices) as (head, tail), ThreadPoolExecutor(1) as thread:
        arriving = thread.submit(lambda: [received(tail) for _ in range(8)])
        for value in range(8):
            hidden.fill_(value)
            head.send(
                1,
                Packet(
                    b"", (hidden, torch.full((3,), value, device=devices[0], dtype=torch.int32))
                ),
                timeout_s=60.0,
            )
        hidden.fill_(-1)
        arrived = arriving.result()
    for value, (first, second) in enumerate(arrived):
        assert first.shape == hidden.shape
        assert bool((first == value).all())
        assert second.tolist() == [value] * 3
    return [first.device for first, _ in arrived]


def test_tensors_go_by_nccl_to_a_stage_with_a_device_of_its_own(
    two_devices: list[torch.device],
) -> None:
    assert set(pass_tensors(two_devices)) == {two_devices[1]}


def test_tensors_of_stages_that_share_a_device_go_within_their_frames(device: torch.device) -> None:
    assert set(pass_tensors([device, device])) == {torch.device("cpu")}


def test_a_lost_stage_ends_its_neighbors_wait(two_devices: list[torch.device]) -> None:
    with pool(two_devices) as (head, tail), ThreadPoolExecutor(1) as thread:
        first = thread.submit(received, tail)
        head.send(1, Packet(b"", (torch.zeros(5, device=two_devices[0]),)), timeout_s=60.0)
        assert first.result()[0].tolist() == [0.0] * 5
        waiting = thread.submit(tail.receive, 0, timeout_s=60.0)
        tail.fail(0, "stage 0 has died")
        with pytest.raises(PeerLostError, match="has died"):
            waiting.result(10)
