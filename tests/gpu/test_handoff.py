"""Handoff from and to a real device's memory, in one process and between two."""

import multiprocessing
import os
import time
from collections.abc import Callable

import pytest
import torch

from bench.handoff_pools import Destination, source_process
from engine.core.layer_range import LayerRange
from engine.memory.layout import PoolGeometry
from engine.memory.pools import StagePools
from engine.memory.staging import CudaCopies, DevicePools, PinnedStaging
from pool.stage.handoff import layer_mark
from runtime.clock import SystemClock
from runtime.errors import ConfigError, InternalError
from testing.memory_transport import MemoryNetwork
from tests.support.device.device_memory import DeviceStage
from tests.support.transfer.damaging_transport import DamagingTransport, flip
from tests.support.transfer.handoff import Pool, hybrid_specs
from transfer.agent.agent import TransferAgent
from transfer.plan.handoff_terms import StageSessionState
from transfer.transport.device import DeviceTransport
from transfer.transport.protocol import Transport
from transfer.ucx.settings import TransportProfile
from transfer.ucx.transport import UcxTransport

OPEN, COMPLETE = StageSessionState.OPEN, StageSessionState.COMPLETE
FAILED, DRAINED = StageSessionState.FAILED, StageSessionState.DRAINED
SPECS = hybrid_specs(4)
SOURCE_PAGES, DEST_PAGES = [3, 4, 5, 9, 10], [7, 8, 9, 2, 3]
NUM_TOKENS = 18


def shm() -> Transport:
    return UcxTransport(profile=TransportProfile.SHM, clock=SystemClock())


@pytest.mark.usefixtures("ucx")
def test_device_to_device_drains_and_lends_nothing(device: torch.device) -> None:
    source, dest = (
        DeviceStage(name, shm(), SPECS, device=device) for name in ("prefill", "decode")
    )
    source.randomize(1)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    dest.agent.open_receive(terms, destination)
    dest.log.wait("s", OPEN)
    source.open_send(terms, destination)
    source.layers_done(NUM_TOKENS)
    assert dest.log.wait("s", COMPLETE, FAILED).state is COMPLETE
    assert source.bytes_of(SOURCE_PAGES) == dest.bytes_of(DEST_PAGES)
    for stage in (dest, source):
        stage.agent.close("s")
        stage.log.wait("s", DRAINED)
        assert stage.agent.shutdown(5.0)
        assert stage.staging.num_lent == 0


@pytest.mark.usefixtures("ucx")
def test_device_to_host_and_back(device: torch.device) -> None:
    stage, host = DeviceStage("device", shm(), SPECS, device=device), Pool("host", [shm()], SPECS)
    stage.randomize(2)
    terms = stage.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = host.destination(terms, DEST_PAGES)
    host.open_receive(terms, destination)
    stage.open_send(terms, destination)
    stage.layers_done(NUM_TOKENS)
    assert host.wait("s", COMPLETE, FAILED)[0].state is COMPLETE
    back, pages = host.terms(DEST_PAGES, NUM_TOKENS), [20, 21, 25, 26, 30]
    destination = stage.destination(back, pages, session_id="back")
    stage.agent.open_receive(back, destination)
    stage.log.wait("back", OPEN)
    host.send(back, destination, request_key=2)
    assert stage.log.wait("back", COMPLETE, FAILED).state is COMPLETE
    assert stage.bytes_of(pages) == stage.bytes_of(SOURCE_PAGES)
    host.shutdown()
    assert stage.agent.shutdown(5.0)


def test_one_flipped_bit_is_caught(device: torch.device) -> None:
    network = MemoryNetwork()
    damaging = DamagingTransport(network.transport(SystemClock()))
    source = DeviceStage("prefill", damaging, SPECS, device=device)
    dest = DeviceStage("decode", network.transport(SystemClock()), SPECS, device=device)
    source.randomize(3)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    damaging.damage = {destination.tag_base + 2: flip(77)}
    dest.agent.open_receive(terms, destination)
    source.open_send(terms, destination)
    source.layers_done(NUM_TOKENS)
    assert dest.log.wait("s", COMPLETE, FAILED).error_reason == "DIGEST_MISMATCH"
    for stage in (dest, source):
        assert stage.agent.shutdown(5.0)


@pytest.mark.usefixtures("ucx")
def test_the_first_chunk_leaves_while_the_last_one_computes(device: torch.device) -> None:
    """The trace's record of it: bytes left before the device had passed the last chunk."""
    source, dest = (
        DeviceStage(name, shm(), SPECS, device=device) for name in ("prefill", "decode")
    )
    source.randomize(4)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    dest.agent.open_receive(terms, destination)
    dest.log.wait("s", OPEN)
    source.open_send(terms, destination)
    mark = layer_mark(device)
    assert mark is not None
    square = torch.randn(4096, 4096, device=device)
    for num_tokens, products in ((8, 1), (16, 1), (NUM_TOKENS, 300)):  # the last: well above 100 ms
        for _ in range(products):
            square = (square @ square).clamp_(-1, 1)
        event = mark()
        for layer_id in range(4):
            source.agent.layer_done(1, layer_id, num_tokens, after=event)
    torch.cuda.synchronize()
    computed_s = time.monotonic()
    chunk_timings = source.log.wait("s", COMPLETE, FAILED).chunk_timings
    assert [part.num_tokens for part in chunk_timings] == [8, 16, NUM_TOKENS]
    assert chunk_timings[0].num_bytes > 0
    assert chunk_timings[0].left_s < computed_s
    assert chunk_timings[2].released_s >= chunk_timings[1].released_s
    dest.log.wait("s", COMPLETE)
    assert source.bytes_of(SOURCE_PAGES) == dest.bytes_of(DEST_PAGES)
    for stage in (dest, source):
        assert stage.agent.shutdown(5.0)


@pytest.mark.usefixtures("ucx")
@pytest.mark.parametrize(("there", "here"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_between_two_processes(there: str, here: str) -> None:
    """The 235 MB of the handoff benchmark; a handoff that is complete has matched every digest."""
    core = min(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    source = context.Process(
        target=source_process, args=(theirs, TransportProfile.SHM, there, core), daemon=True
    )
    source.start()
    destination = Destination(TransportProfile.SHM, here)
    try:
        for number in range(2):
            assert destination.handoff(ours, number) > 0
        assert destination.num_bytes > 200_000_000
        ours.send(None)
        source.join(30)
        assert source.exitcode == 0
    finally:
        destination.close()
        source.kill()


def agent_with(
    device: torch.device, hook: Callable[[PinnedStaging], Callable[[], None]]
) -> TransferAgent:
    clock = SystemClock()
    staging = PinnedStaging(CudaCopies(device), num_buffers=2, buffer_bytes=1 << 14)
    pools = StagePools(PoolGeometry(4, 8, 4, LayerRange(0, 4), SPECS))
    transport = DeviceTransport(MemoryNetwork().transport(clock), staging, clock)
    return TransferAgent(
        memory=DevicePools(pools),
        transport=transport,
        clock=clock,
        incarnation="a",
        on_event=lambda event: None,
        on_thread_start=hook(staging),
    )


def test_a_thread_without_a_context_is_refused_at_the_start(device: torch.device) -> None:
    with pytest.raises(InternalError, match="no context"):
        agent_with(device, lambda staging: lambda: None).start()
    with pytest.raises(ConfigError, match="cannot be used for handoffs"):
        agent_with(torch.device("cuda", 99), lambda staging: staging.enter_thread).start()
    agent = agent_with(device, lambda staging: staging.enter_thread)
    agent.start()
    assert agent.shutdown(5.0)
