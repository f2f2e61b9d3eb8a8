"""S4-9: every record arrives in the layer it came from, for any split of the two sides.

Each record of the source holds bytes made from its own layer, kind and index, so a record of a
neighbor, another kind or another page in its place shows. The pools are real ones, the agents too.
"""

import hashlib
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from engine.core.layer_range import LayerRange, get_pp_indices
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry
from engine.memory.pools import StagePools
from runtime.clock import SystemClock
from testing.memory_transport import MemoryNetwork
from tests.support.transfer.handoff import EventLog
from transfer.agent.agent import TransferAgent
from transfer.plan.copy_plan import plan_destination
from transfer.plan.handoff_terms import SourceTerms, StageSessionEvent, StageSessionState
from transfer.transport.authenticator import new_key
from transfer.transport.protocol import Transport
from transfer.ucx.settings import TransportProfile
from transfer.ucx.transport import UcxTransport

PAGE_SIZE, NUM_PAGES, NUM_SLOTS, NUM_TOKENS = 4, 12, 5, 18
SOURCE_PAGES, DEST_PAGES = (3, 4, 5, 9, 10), (7, 8, 2, 10, 1)
SOURCE_SLOT, DEST_SLOT = 2, 4
UNTOUCHED = 0xEE

MakeTransport = Callable[[], Transport]


def _plain(num_layers: int) -> tuple[CacheSpec, ...]:
    return tuple(
        CacheSpec(layer_id, CacheKind.KV, (2, 2, PAGE_SIZE, 8), "bfloat16", 2)
        for layer_id in range(num_layers)
    )


def _hybrid(num_layers: int) -> tuple[CacheSpec, ...]:
    """Return specs in which every fourth layer attends: on four stages of four layers, three have
    no page and one no slot."""
    specs: list[CacheSpec] = []
    for layer_id in range(num_layers):
        if layer_id % 4 == 3:
            specs.append(CacheSpec(layer_id, CacheKind.KV, (2, 2, PAGE_SIZE, 8), "bfloat16", 2))
        else:
            specs.append(CacheSpec(layer_id, CacheKind.CONV, (3, 24), "bfloat16", 2))
            specs.append(CacheSpec(layer_id, CacheKind.STATE, (2, 8, 8), "float32", 4))
    return tuple(specs)


def _selecting(num_layers: int) -> tuple[CacheSpec, ...]:
    """Return specs with latents on every layer and index keys on layers that choose: frequency 4,
    offset 3."""
    specs = []
    for layer_id in range(num_layers):
        specs.append(CacheSpec(layer_id, CacheKind.LATENT, (PAGE_SIZE, 24), "bfloat16", 2))
        if max(layer_id - 2, 0) % 4 == 0:
            specs.append(CacheSpec(layer_id, CacheKind.INDEX_KEY, (PAGE_SIZE, 16), "bfloat16", 2))
    return tuple(specs)


MODELS = {
    "plain of 7": _plain(7),
    "hybrid of 8": _hybrid(8),
    "hybrid of 4": _hybrid(4),
    "DSA of 8": _selecting(8),
}


def stamp(spec: CacheSpec, index: int) -> bytes:
    """Return the content of record `index` of the source."""
    seed = hashlib.blake2b(f"{spec.layer_id} {spec.kind} {index}".encode(), digest_size=32).digest()
    return (seed * (spec.record_bytes // len(seed) + 1))[: spec.record_bytes]


def blank(spec: CacheSpec, index: int) -> bytes:
    """Return the initial content of record `index` of the destination."""
    return bytes([UNTOUCHED]) * spec.record_bytes


class StageOfPools:
    """One stage: real pools, an agent over them, and what it reported."""

    def __init__(
        self,
        name: str,
        layers: LayerRange,
        specs: tuple[CacheSpec, ...],
        transport: Transport,
        content: Callable[[CacheSpec, int], bytes],
    ) -> None:
        self.pools = StagePools(PoolGeometry(PAGE_SIZE, NUM_PAGES, NUM_SLOTS, layers, specs))
        for spec in self.pools.geometry.local_specs():
            for index in range(NUM_PAGES if spec.kind.is_paged else NUM_SLOTS):
                self.record(spec, index)[:] = content(spec, index)
        self.log = EventLog()
        self.agent = TransferAgent(
            memory=self.pools,
            transport=transport,
            clock=SystemClock(),
            incarnation=name,
            on_event=self.log,
        )
        self.agent.start()

    def record(self, spec: CacheSpec, index: int) -> memoryview:
        return self.pools.view(spec.layer_id, spec.kind, index, 1)


def build(
    name: str,
    specs: tuple[CacheSpec, ...],
    partition: Sequence[LayerRange],
    make_transport: MakeTransport,
    content: Callable[[CacheSpec, int], bytes],
) -> list[StageOfPools]:
    return [
        StageOfPools(f"{name}-{rank}", layers, specs, make_transport(), content)
        for rank, layers in enumerate(partition)
    ]


def wait_all(stages: Sequence[StageOfPools], state: StageSessionState) -> list[StageSessionEvent]:
    events = [stage.log.wait("s", state, StageSessionState.FAILED) for stage in stages]
    assert {event.state for event in events} == {state}, events
    return events


def hand_over(
    source: list[StageOfPools], dest: list[StageOfPools], specs: tuple[CacheSpec, ...]
) -> None:
    """Run one whole session, with the prompt computed in chunks of two pages."""
    terms = SourceTerms(
        "c",
        "text",
        PAGE_SIZE,
        NUM_TOKENS,
        2 * PAGE_SIZE,
        SOURCE_PAGES,
        SOURCE_SLOT,
        tuple(stage.agent.endpoint for stage in source),
    )
    destination = plan_destination(
        terms,
        session_id="s",
        epoch=0,
        tag_base=7 << 32,
        key=new_key(),
        page_ids=DEST_PAGES,
        slot_id=DEST_SLOT,
        stages=[stage.agent.endpoint for stage in dest],
        specs=specs,
    )
    for stage in dest:
        stage.agent.open_receive(terms, destination)
    wait_all(dest, StageSessionState.OPEN)
    for stage in source:
        stage.agent.expect_send(1, NUM_TOKENS)
        stage.agent.open_send(1, terms, destination)
    for num_tokens in (8, 16, NUM_TOKENS):
        for stage in source:
            for layer_id in stage.pools.geometry.layers:
                stage.agent.layer_done(1, layer_id, num_tokens)
    sent, landed = (
        sum(event.num_bytes for event in wait_all(stages, StageSessionState.COMPLETE))
        for stages in (source, dest)
    )
    pages, slots = len(DEST_PAGES), 1
    assert (
        sent
        == landed
        == sum(spec.record_bytes * (pages if spec.kind.is_paged else slots) for spec in specs)
    )


def assert_placed(dest: list[StageOfPools]) -> None:
    """Check that every record of the request has the stamp of its layer and source index, and that
    every other record is unchanged."""
    for stage in dest:
        for spec in stage.pools.geometry.local_specs():
            arrived = (
                dict(
                    zip(DEST_PAGES, SOURCE_PAGES, strict=True)
                    if spec.kind.is_paged
                    else [(DEST_SLOT, SOURCE_SLOT)]
                )
                if spec.travels
                else {}
            )
            for index in range(NUM_PAGES if spec.kind.is_paged else NUM_SLOTS):
                expected = stamp(spec, arrived[index]) if index in arrived else blank(spec, index)
                assert bytes(stage.record(spec, index)) == expected, (
                    f"layer {spec.layer_id} {spec.kind} {index}"
                )


def check(
    specs: tuple[CacheSpec, ...],
    prefill: Sequence[LayerRange],
    decode: Sequence[LayerRange],
    make_transport: MakeTransport,
) -> None:
    source = build("prefill", specs, prefill, make_transport, stamp)
    dest = build("decode", specs, decode, make_transport, blank)
    try:
        hand_over(source, dest, specs)
        assert_placed(dest)
    finally:
        drained = [stage.agent.shutdown(5.0) for stage in (*source, *dest)]
    assert all(drained)


def ranges(specs: Sequence[CacheSpec], size: int, partition: str | None = None) -> list[LayerRange]:
    num_layers = max(spec.layer_id for spec in specs) + 1
    return [get_pp_indices(num_layers, rank, size, partition) for rank in range(size)]


def front_heavy(num_layers: int, size: int) -> str:
    """Split as unevenly as possible: all stages but the first have one layer."""
    return ",".join([str(num_layers - size + 1), *["1"] * (size - 1)])


def memory_transports() -> MakeTransport:
    network = MemoryNetwork()
    return lambda: network.transport(SystemClock())


@pytest.mark.parametrize(("prefill_pp", "decode_pp"), list(product(range(1, 5), repeat=2)))
@pytest.mark.parametrize("model", MODELS)
def test_s4_3_s4_9_layers_land_in_their_place_under_the_default_split(
    model: str, prefill_pp: int, decode_pp: int
) -> None:
    specs = MODELS[model]
    check(specs, ranges(specs, prefill_pp), ranges(specs, decode_pp), memory_transports())


@pytest.mark.parametrize(("prefill_pp", "decode_pp"), list(product(range(2, 5), repeat=2)))
@pytest.mark.parametrize("model", MODELS)
def test_s4_9_layers_land_in_their_place_under_custom_partitions(
    model: str, prefill_pp: int, decode_pp: int
) -> None:
    """Wide first stages send to wide last ones, so that no two borders meet where they can help
    it."""
    specs = MODELS[model]
    num_layers = max(spec.layer_id for spec in specs) + 1
    backwards = ",".join(reversed(front_heavy(num_layers, decode_pp).split(",")))
    check(
        specs,
        ranges(specs, prefill_pp, front_heavy(num_layers, prefill_pp)),
        ranges(specs, decode_pp, backwards),
        memory_transports(),
    )


@pytest.mark.parametrize(("prefill_pp", "decode_pp"), [(1, 1), (2, 3), (3, 2), (4, 4)])
@pytest.mark.parametrize("roomy", ["prefill", "decode", "both"])
def test_s2_10_pools_with_and_without_unread_index_keys_hand_over(
    roomy: str, prefill_pp: int, decode_pp: int
) -> None:
    """Layers that share their selection keep no index keys; a pool that keeps room for them all the
    same neither sends nor receives them."""
    lean = MODELS["DSA of 8"]
    chosen = {spec.layer_id for spec in lean if spec.kind is CacheKind.INDEX_KEY}
    unread = [
        CacheSpec(layer_id, CacheKind.INDEX_KEY, (PAGE_SIZE, 16), "bfloat16", 2, travels=False)
        for layer_id in range(8)
        if layer_id not in chosen
    ]
    both = (*lean, *unread)
    network = memory_transports()
    source = build(
        "prefill", lean if roomy == "decode" else both, ranges(lean, prefill_pp), network, stamp
    )
    dest = build(
        "decode", lean if roomy == "prefill" else both, ranges(lean, decode_pp), network, blank
    )
    try:
        hand_over(source, dest, lean)
        assert_placed(dest)
    finally:
        drained = [stage.agent.shutdown(5.0) for stage in (*source, *dest)]
    assert all(drained)


@pytest.mark.parametrize("profile", ["shm", "tcp"])
@pytest.mark.parametrize(("prefill_pp", "decode_pp"), [(2, 3), (4, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_s4_9_layers_land_in_their_place_over_ucx(
    model: str, prefill_pp: int, decode_pp: int, profile: str
) -> None:
    specs = MODELS[model]
    check(
        specs,
        ranges(specs, prefill_pp),
        ranges(specs, decode_pp),
        lambda: UcxTransport(profile=TransportProfile(profile), clock=SystemClock()),
    )


def test_stamps_differ() -> None:
    """Otherwise the tests above could not tell records apart."""
    for specs in MODELS.values():
        stamps = [stamp(spec, index) for spec in specs for index in range(NUM_PAGES)]
        assert len(set(stamps)) == len(stamps)
