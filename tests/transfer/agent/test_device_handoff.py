"""Handoff between pools on a device, and between those and host pools: nothing early, nothing
wrong, all drained."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.core.layer_range import LayerRange
from engine.memory.layout import CacheKind, PoolGeometry
from engine.memory.pools import StagePools
from engine.memory.staging import DevicePools, PinnedStaging
from runtime.clock import SystemClock
from runtime.errors import ConfigError, InternalError
from testing.memory_transport import MemoryNetwork
from tests.support.device.device_memory import DeviceStage, HandCopies, HandEvent
from tests.support.transfer.damaging_transport import DamagingTransport, flip
from tests.support.transfer.handoff import Pool, hybrid_specs, wait_until
from tests.transfer.contract import TransportContract
from transfer.agent.agent import AgentLimits, TransferAgent
from transfer.plan.copy_plan import check_plan
from transfer.plan.handoff_terms import StageSessionState
from transfer.transport.device import DeviceTransport, Route
from transfer.transport.protocol import Transport
from transfer.ucx import settings as ucx_settings
from transfer.ucx.settings import TransportProfile
from transfer.ucx.transport import UcxTransport

OPEN, COMPLETE = StageSessionState.OPEN, StageSessionState.COMPLETE
FAILED, DRAINED = StageSessionState.FAILED, StageSessionState.DRAINED
SPECS = hybrid_specs(4)
SOURCE_PAGES, DEST_PAGES = [3, 4, 5, 9, 10], [7, 8, 9, 2, 3]
NUM_TOKENS = 18


@pytest.fixture(params=["memory", "shm"])
def make_transport(request: pytest.FixtureRequest) -> Callable[[], Transport]:
    if request.param == "memory":
        network = MemoryNetwork()
        return lambda: network.transport(SystemClock())
    return lambda: UcxTransport(profile=TransportProfile(request.param), clock=SystemClock())


class Stages:
    """Makes stages on the device, and ends them: nothing may be lent then."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.made: list[DeviceStage] = []

    def __call__(
        self,
        name: str,
        *,
        transport: Transport | None = None,
        copies: HandCopies | None = None,
        num_buffers: int = 4,
        limits: AgentLimits | None = None,
        copy_limit_s: float = 10.0,
        route: Route = Route.PINNED,
    ) -> DeviceStage:
        transport = transport or self.network.transport(SystemClock())
        self.made.append(
            DeviceStage(
                name,
                transport,
                SPECS,
                copies=copies,
                num_buffers=num_buffers,
                limits=limits,
                copy_limit_s=copy_limit_s,
                route=route,
            )
        )
        return self.made[-1]


@pytest.fixture
def stages() -> Iterator[Stages]:
    stages = Stages()
    yield stages
    for stage in stages.made:
        stage.copies.free = True
        if stage.agent.failure is None:
            assert stage.agent.shutdown(60.0)
            assert stage.staging.num_lent == 0


def hand_over(source: DeviceStage, dest: DeviceStage) -> None:
    """Open both sides of session "s"."""
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    dest.agent.open_receive(terms, destination)
    dest.log.wait("s", OPEN)
    source.open_send(terms, destination)
    source.log.wait("s", OPEN)


def assert_landed(source: DeviceStage, dest: DeviceStage) -> None:
    assert source.bytes_of(SOURCE_PAGES) == dest.bytes_of(DEST_PAGES)
    others = [page for page in range(32) if page not in DEST_PAGES]
    assert not any(any(record) for record in dest.bytes_of(others, slot=2)), (
        "bytes outside the destination changed"
    )


def test_device_to_device(stages: Stages, make_transport: Callable[[], Transport]) -> None:
    source, dest = (
        stages("prefill", transport=make_transport()),
        stages("decode", transport=make_transport()),
    )
    source.randomize(1)
    hand_over(source, dest)
    source.layers_done(NUM_TOKENS)
    assert (
        source.log.wait("s", COMPLETE, FAILED).num_bytes
        == dest.log.wait("s", COMPLETE, FAILED).num_bytes
        > 0
    )
    assert_landed(source, dest)
    for stage in (source, dest):
        stage.agent.close("s")
        stage.log.wait("s", DRAINED)
        assert stage.log.states("s") == [OPEN, COMPLETE, DRAINED]
        wait_until(lambda stage=stage: stage.staging.num_lent == 0)  # type: ignore[misc]
        assert stage.agent.stats().num_pending_operations == 0


def test_device_to_host_and_host_to_device(
    stages: Stages, make_transport: Callable[[], Transport]
) -> None:
    device, host = (
        stages("device", transport=make_transport()),
        Pool("host", [make_transport()], SPECS),
    )
    device.randomize(2)
    terms = device.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = host.destination(terms, DEST_PAGES)
    host.open_receive(terms, destination)
    device.open_send(terms, destination)
    device.layers_done(NUM_TOKENS)
    assert host.wait("s", COMPLETE, FAILED)[0].state is COMPLETE
    memory = host.stages[0].memory
    sent = device.bytes_of(SOURCE_PAGES)
    assert sent == [
        bytes(memory.view(spec.layer_id, spec.kind, index, 1))
        for spec in SPECS
        for index in (DEST_PAGES if spec.kind.is_paged else [1])
    ]
    back = host.terms(DEST_PAGES, NUM_TOKENS)
    pages = [20, 21, 25, 26, 30]
    destination = device.destination(back, pages, session_id="back")
    device.agent.open_receive(back, destination)
    device.log.wait("back", OPEN)
    host.send(back, destination, request_key=2)
    assert device.log.wait("back", COMPLETE, FAILED).state is COMPLETE
    assert device.bytes_of(pages) == sent
    host.shutdown()


def test_two_buffers_are_enough_for_many_sessions_at_once(stages: Stages) -> None:
    source, dest = stages("prefill", num_buffers=2), stages("decode", num_buffers=2)
    source.randomize(3)
    names = [f"s{i}" for i in range(5)]
    for i, name in enumerate(names):
        terms = source.terms([2 * i + 1, 2 * i + 2], 8)
        destination = dest.destination(terms, [20 - 2 * i, 21 - 2 * i], session_id=name)
        dest.agent.open_receive(terms, destination)
        source.open_send(terms, destination, request_key=i)
    for i in range(5):
        source.layers_done(8, request_key=i)
    for i, name in enumerate(names):
        assert dest.log.wait(name, COMPLETE, FAILED).state is COMPLETE
        kv = [spec for spec in SPECS if spec.kind is CacheKind.KV]
        for spec in kv:
            assert source.pools.view(spec.layer_id, spec.kind, 2 * i + 1, 2) == dest.pools.view(
                spec.layer_id, spec.kind, 20 - 2 * i, 2
            )


def test_sends_leave_half_of_the_buffers_to_receives(stages: Stages) -> None:
    copies = HandCopies(free=False)
    source, dest = stages("prefill", num_buffers=6, copies=copies), stages("decode")
    hand_over(source, dest)
    source.layers_done(NUM_TOKENS)
    wait_until(lambda: len(copies.waiting) == 3)
    assert source.staging.num_lent == 3
    copies.free = True
    dest.log.wait("s", COMPLETE)


def test_one_flipped_bit_is_caught_and_named(stages: Stages) -> None:
    damaging = DamagingTransport(stages.network.transport(SystemClock()))
    source, dest = stages("prefill", transport=damaging), stages("decode")
    source.randomize(4)
    terms = source.terms(SOURCE_PAGES, NUM_TOKENS)
    destination = dest.destination(terms, DEST_PAGES)
    item = check_plan(terms, destination, SPECS).lanes_to(0)[0].items[2]
    damaging.damage = {destination.tag_base + 2: flip(77)}
    dest.agent.open_receive(terms, destination)
    source.open_send(terms, destination)
    source.layers_done(NUM_TOKENS)
    event = dest.log.wait("s", COMPLETE, FAILED)
    assert event.error_reason == "DIGEST_MISMATCH"
    assert event.error_text.startswith(item.name)


def test_a_layer_is_sent_after_its_event_while_the_next_chunk_computes(
    stages: Stages,
) -> None:
    """Overlap, seen from both ends: bytes of the first chunk have arrived before the last chunk's
    events pass."""
    source, dest = stages("prefill"), stages("decode")
    source.randomize(5)
    hand_over(source, dest)
    first, last = HandEvent(), HandEvent()
    for num_tokens, event in ((8, first), (NUM_TOKENS, last)):
        for layer_id in range(4):
            source.agent.layer_done(1, layer_id, num_tokens, after=event)
    wait_until(lambda: first.num_queries > 2)
    assert source.copies.num_copies == 0, "copied before the device had computed it"
    first.passed = True
    early, late = DEST_PAGES[:2], DEST_PAGES[2:]
    kv = dest.pools.of_kind(CacheKind.KV)
    wait_until(
        lambda: all(bool(kv[layer_id].view(torch.uint8)[early].any()) for layer_id in (1, 3))
    )
    assert not any(bool(kv[layer_id].view(torch.uint8)[late].any()) for layer_id in (1, 3))
    assert source.agent.stats().num_waiting_layers == 4
    last.passed = True
    dest.log.wait("s", COMPLETE)
    assert_landed(source, dest)
    assert source.agent.stats().num_waiting_layers == 0


def test_an_event_that_never_passes_fails_the_session_and_names_the_layer(stages: Stages) -> None:
    source, dest = stages("prefill", limits=AgentLimits(layer_s=0.1)), stages("decode")
    hand_over(source, dest)
    source.agent.layer_done(1, 1, 8, after=HandEvent())
    event = source.log.wait("s", FAILED)
    assert event.error_text.startswith("layer 1 was not done 0.1 s after")
    source.agent.close_request(1)
    source.log.wait("s", DRAINED)
    terms = source.terms([12, 13], 8)
    destination = dest.destination(terms, [12, 13], session_id="later")
    source.agent.expect_send(7, 8)
    source.agent.layer_done(7, 1, 8, after=HandEvent())
    wait_until(lambda: source.agent.stats().num_waiting_layers == 0)
    source.agent.open_send(7, terms, destination)
    assert "layer 1" in source.log.wait("later", FAILED).error_text, (
        "a request that failed before it was opened"
    )


def test_closing_while_events_are_pending_leaks_nothing(stages: Stages) -> None:
    source, dest = stages("prefill"), stages("decode")
    hand_over(source, dest)
    event = HandEvent()
    for request_key in (1, 2):
        source.agent.expect_send(request_key, NUM_TOKENS)
        source.agent.layer_done(request_key, 1, NUM_TOKENS, after=event)
    wait_until(lambda: source.agent.stats().num_waiting_layers == 2)
    source.agent.close_request(1)
    source.log.wait("s", DRAINED)
    assert source.agent.stats().num_waiting_layers == 1
    source.agent.close_all()
    wait_until(lambda: source.agent.stats().num_waiting_layers == 0)
    event.passed = True
    assert source.copies.num_copies == 0
    assert source.log.states("s") == [OPEN, DRAINED]


def test_a_sender_is_drained_only_when_no_copy_reads_its_pages_any_more(stages: Stages) -> None:
    copies = HandCopies(free=False)
    source, dest = stages("prefill", copies=copies), stages("decode")
    hand_over(source, dest)
    source.layers_done(NUM_TOKENS)
    wait_until(lambda: len(copies.waiting) == 2)
    source.agent.close("s")
    source.agent.close("never opened")
    wait_until(lambda: source.agent.stats().num_draining == 1)
    assert DRAINED not in source.log.states("s")
    copies.run()
    copies.free = True
    dest.agent.close("s")
    source.log.wait("s", DRAINED)


def test_a_receiver_is_complete_and_drained_only_after_every_copy(
    stages: Stages,
) -> None:
    copies = HandCopies(free=False)
    source, dest = stages("prefill"), stages("decode", copies=copies)
    source.randomize(6)
    hand_over(source, dest)
    source.layers_done(NUM_TOKENS)
    num_items = len(
        check_plan(
            source.terms(SOURCE_PAGES, NUM_TOKENS),
            dest.destination(source.terms(SOURCE_PAGES, NUM_TOKENS), DEST_PAGES),
            SPECS,
        )
        .lanes_to(0)[0]
        .items
    )
    for _ in range(num_items - 1):
        wait_until(lambda: bool(copies.waiting))
        copies.run(1)
    wait_until(lambda: bool(copies.waiting))
    assert dest.log.states("s") == [OPEN]
    dest.agent.close("s")
    wait_until(lambda: dest.agent.stats().num_draining == 1)
    assert dest.log.states("s") == [OPEN], (
        "a copy still writes to pages that the drain would give away"
    )
    copies.run()
    dest.log.wait("s", DRAINED)


def test_messages_that_wait_for_a_buffer_are_given_up_at_a_close(stages: Stages) -> None:
    copies = HandCopies(free=False)
    source, dest = stages("prefill"), stages("decode", copies=copies, num_buffers=2)
    hand_over(source, dest)
    source.layers_done(NUM_TOKENS)
    wait_until(lambda: len(copies.waiting) == 2)
    assert source.log.states("s") == [OPEN], "the rest has nowhere to go yet"
    dest.agent.close("s")
    source.log.wait("s", COMPLETE)  # it was taken and thrown away
    assert dest.log.states("s") == [OPEN], "two copies still write"
    copies.run()
    dest.log.wait("s", DRAINED)
    assert copies.num_copies == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_copy_that_never_ends_fails_the_stage_and_never_drains(stages: Stages) -> None:
    copies = HandCopies(free=False)
    source, dest = stages("prefill", copies=copies, copy_limit_s=0.2), stages("decode")
    hand_over(source, dest)
    source.layers_done(NUM_TOKENS)
    event = source.log.wait("s", FAILED)
    assert "has not ended a copy" in event.error_text
    wait_until(lambda: source.agent.failure is not None)
    source.agent.shutdown(60.0)
    assert source.log.states("s") == [OPEN, FAILED]


@pytest.fixture
def reaching(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Transport]:
    """Return a maker of real UCX that takes a device's memory by its address; host memory replaces
    it."""
    monkeypatch.setattr(ucx_settings, "_DEVICE_TRANSPORTS", frozenset())
    return lambda: UcxTransport(profile=TransportProfile.CUDA, clock=SystemClock())


def test_a_direct_route_moves_no_bytes_through_the_host(
    stages: Stages, reaching: Callable[[], Transport]
) -> None:
    source = stages("prefill", transport=reaching(), route=Route.DIRECT, num_buffers=2)
    dest = stages("decode", transport=reaching(), route=Route.DIRECT, num_buffers=2)
    source.randomize(7)
    hand_over(source, dest)
    source.layers_done(NUM_TOKENS)
    assert dest.log.wait("s", COMPLETE, FAILED).state is COMPLETE
    source.log.wait("s", COMPLETE)
    assert_landed(source, dest)
    for stage in (source, dest):
        stage.agent.close("s")
        stage.log.wait("s", DRAINED)


def test_a_direct_receive_completes_only_after_a_matching_read_back(
    stages: Stages, reaching: Callable[[], Transport]
) -> None:
    copies = HandCopies(free=False)
    source = stages("prefill", transport=reaching(), route=Route.DIRECT)
    dest = stages("decode", transport=reaching(), route=Route.DIRECT, copies=copies)
    source.randomize(8)
    hand_over(source, dest)
    source.layers_done(NUM_TOKENS)
    source.log.wait("s", COMPLETE)
    wait_until(lambda: len(copies.waiting) == 4)
    assert dest.log.states("s") == [OPEN]
    dest.pools.kv[1].fill_(1.0)  # what is on the device is not what came
    copies.free = True
    assert dest.log.wait("s", COMPLETE, FAILED).error_reason == "DIGEST_MISMATCH"


def test_a_direct_route_works_with_a_pinned_one_and_the_host(
    stages: Stages, reaching: Callable[[], Transport]
) -> None:
    """Which way a side's bytes go is its own affair."""
    direct = stages("direct", transport=reaching(), route=Route.DIRECT)
    pinned = stages(
        "pinned", transport=UcxTransport(profile=TransportProfile.SHM, clock=SystemClock())
    )
    direct.randomize(9)
    hand_over(direct, pinned)
    direct.layers_done(NUM_TOKENS)
    assert pinned.log.wait("s", COMPLETE, FAILED).state is COMPLETE
    assert_landed(direct, pinned)


def test_a_device_profile_is_refused_if_ucx_reaches_no_device() -> None:
    with pytest.raises(
        ConfigError, match="does not reach CUDA devices here: of cuda_copy, cuda_ipc it has neither"
    ):
        UcxTransport(profile=TransportProfile.CUDA, clock=SystemClock())


def make_agent(
    on_thread_start: Callable[[], None],
) -> tuple[TransferAgent, PinnedStaging, HandCopies]:
    copies, clock = HandCopies(), SystemClock()
    pools = StagePools(PoolGeometry(4, 8, 4, LayerRange(0, 4), SPECS))
    staging = PinnedStaging(copies, num_buffers=2, buffer_bytes=1 << 14, pinned=False)
    transport = DeviceTransport(MemoryNetwork().transport(clock), staging, clock)
    return (
        TransferAgent(
            memory=DevicePools(pools),
            transport=transport,
            clock=clock,
            incarnation="a",
            on_event=lambda event: None,
            on_thread_start=on_thread_start,
        ),
        staging,
        copies,
    )


def test_a_thread_without_a_context_is_refused_at_the_start() -> None:
    agent, _, _ = make_agent(lambda: None)
    with pytest.raises(
        InternalError,
        match=r"no context of the device: give `enter_thread` .* as `on_thread_start`",
    ):
        agent.start()
    assert agent.shutdown(60.0)


def test_a_device_error_of_the_thread_is_raised_at_the_start() -> None:
    def refuse() -> None:
        raise ConfigError("device cuda:7 cannot be used for handoffs", field="device")

    agent, _, _ = make_agent(refuse)
    with pytest.raises(ConfigError, match="cuda:7"):
        agent.start()
    assert agent.shutdown(60.0)


def test_the_context_belongs_to_the_agents_thread() -> None:
    entered = list[str]()

    def enter() -> None:
        entered.append(threading.current_thread().name)
        staging.enter_thread()

    agent, staging, copies = make_agent(enter)
    agent.start()
    assert entered == ["transfer-agent"]
    assert copies.num_threads == 1
    with pytest.raises(InternalError, match="no context"):
        staging.check_thread()
    assert agent.shutdown(60.0)


def test_a_device_is_no_host_memory() -> None:
    pools = DevicePools(StagePools(PoolGeometry(4, 8, 4, LayerRange(0, 4), SPECS)))
    transport = MemoryNetwork().transport(SystemClock())
    with pytest.raises(InternalError, match="Tensor is not host memory"):
        transport.send(transport.connect(transport.address), 1, pools.view(1, CacheKind.KV, 1, 1))
    transport.close()


def test_staging_refuses_unsupported_copies() -> None:
    with pytest.raises(ConfigError, match="at least 2 buffers"):
        PinnedStaging(HandCopies(), num_buffers=1, buffer_bytes=64, pinned=False)
    copies = HandCopies(free=False)
    staging = PinnedStaging(copies, num_buffers=2, buffer_bytes=64, pinned=False)
    with pytest.raises(InternalError, match="65 bytes for staging buffers of 64"):
        staging.borrow(65)
    loans = [staging.borrow(64), staging.borrow(10)]
    assert staging.borrow(1) is None
    assert loans[0] is not None
    loans[0].fetch(torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(InternalError, match="while it is being copied"):
        loans[0].release()
    copies.run()
    loans[0].release()
    loans[0].release()
    assert staging.num_lent == 1


class TestContract(TransportContract):
    """What is in host memory passes through as if the staging were not there."""

    @pytest.fixture
    def make_transport(self) -> Callable[[], Transport]:
        network = MemoryNetwork()

        def make() -> Transport:
            staging = PinnedStaging(HandCopies(), num_buffers=2, buffer_bytes=64, pinned=False)
            staging.enter_thread()
            return DeviceTransport(network.transport(SystemClock()), staging, SystemClock())

        return make
