"""Two pools of transfer agents over plain arrays: what handoff tests and the handoff benchmark are
made of."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from engine.core.layer_range import LayerRange, get_pp_indices
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry
from runtime.clock import Clock, SystemClock
from runtime.errors import InternalError
from transfer.agent.agent import AgentLimits, TransferAgent
from transfer.plan.copy_plan import plan_destination
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageSessionEvent,
    StageSessionState,
)
from transfer.transport.authenticator import new_key
from transfer.transport.protocol import Transport

Bytes = npt.NDArray[np.uint8]


class ArrayMemory:
    """A `PoolMemory` of numpy bytes; every byte starts as `fill`."""

    def __init__(self, geometry: PoolGeometry, *, fill: int = 0) -> None:
        self.geometry = geometry
        self.arrays: dict[tuple[int, CacheKind], Bytes] = {}
        for spec in geometry.local_specs():
            count = geometry.num_pages if spec.kind.is_paged else geometry.num_slots
            self.arrays[spec.layer_id, spec.kind] = np.full(
                (count, spec.record_bytes), fill, dtype=np.uint8
            )

    def view(
        self,
        layer_id: int,
        kind: CacheKind,
        first_index: int,
        count: int,
        part: slice | None = None,
    ) -> memoryview:
        array = self.arrays.get((layer_id, kind))
        if array is None or not 0 <= first_index <= first_index + count <= len(array):
            raise InternalError(
                f"no {kind} {first_index}+{count} of layer {layer_id} in {self.geometry.layers}"
            )
        return array[first_index : first_index + count].data.cast("B")[part or slice(None)]

    def randomize(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for array in self.arrays.values():
            array[:] = rng.integers(0, 256, array.shape, dtype=np.uint8)


def hybrid_specs(num_layers: int = 4, *, page_size: int = 4) -> tuple[CacheSpec, ...]:
    """Return specs in which every second layer has paged K/V, the others conv and recurrent
    state."""
    specs: list[CacheSpec] = []
    for layer_id in range(num_layers):
        if layer_id % 2:
            specs.append(CacheSpec(layer_id, CacheKind.KV, (2, 2, page_size, 8), "bfloat16", 2))
        else:
            specs.append(CacheSpec(layer_id, CacheKind.CONV, (3, 24), "bfloat16", 2))
            specs.append(CacheSpec(layer_id, CacheKind.STATE, (2, 8, 8), "float32", 4))
    return tuple(specs)


class EventLog:
    """What agents reported; `wait` blocks until a report has come."""

    def __init__(self) -> None:
        self.events: list[StageSessionEvent] = []
        self.listener: Callable[[StageSessionEvent], None] | None = None
        self._changed = threading.Condition()

    def __call__(self, event: StageSessionEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        if self.listener is not None:
            self.listener(event)

    def states(self, session_id: str, epoch: int = 0) -> list[StageSessionState]:
        return [
            event.state
            for event in self.events
            if (event.session_id, event.epoch) == (session_id, epoch)
        ]

    def find(
        self, session_id: str, state: StageSessionState, epoch: int = 0
    ) -> StageSessionEvent | None:
        wanted = (session_id, epoch, state)
        return next(
            (
                event
                for event in self.events
                if (event.session_id, event.epoch, event.state) == wanted
            ),
            None,
        )

    def wait(
        self, session_id: str, *states: StageSessionState, epoch: int = 0, timeout_s: float = 60.0
    ) -> StageSessionEvent:
        """Return the first report of one of these states."""
        with self._changed:
            found: StageSessionEvent | None = None

            def has_come() -> bool:
                nonlocal found
                found = next(
                    filter(None, (self.find(session_id, state, epoch) for state in states)), None
                )
                return found is not None

            if not self._changed.wait_for(has_come, timeout_s) or found is None:
                raise AssertionError(
                    f"no {states} for {session_id} epoch {epoch}; came: {self.events}"
                )
            return found


@dataclass
class Stage:
    memory: ArrayMemory
    agent: TransferAgent
    log: EventLog


class Pool:
    """The agents of one pool, started."""

    def __init__(
        self,
        name: str,
        transports: Sequence[Transport],
        specs: tuple[CacheSpec, ...],
        *,
        page_size: int = 4,
        num_pages: int = 32,
        num_slots: int = 8,
        clock: Clock | None = None,
        limits: AgentLimits | None = None,
        partition: Sequence[LayerRange] | None = None,
        listener: Callable[[int, StageSessionEvent], None] | None = None,
    ) -> None:
        """Create the pool; `listener` gets each (rank, report) as well, on the agents' threads."""
        num_layers = max(spec.layer_id for spec in specs) + 1
        self.specs, self.page_size, self.stages = specs, page_size, list[Stage]()
        for rank, transport in enumerate(transports):
            layers = (
                partition[rank] if partition else get_pp_indices(num_layers, rank, len(transports))
            )
            memory, log = (
                ArrayMemory(PoolGeometry(page_size, num_pages, num_slots, layers, specs)),
                EventLog(),
            )
            if listener is not None:
                log.listener = partial(listener, rank)
            agent = TransferAgent(
                memory=memory,
                transport=transport,
                clock=clock or SystemClock(),
                incarnation=f"{name}-{rank}",
                on_event=log,
                limits=limits,
            )
            agent.start()
            self.stages.append(Stage(memory, agent, log))

    def terms(
        self, page_ids: Sequence[int], num_tokens: int, *, slot_id: int = 1, chunk_tokens: int = 8
    ) -> SourceTerms:
        """Return the terms of a handoff's source."""
        return SourceTerms(
            "c",
            "text",
            self.page_size,
            num_tokens,
            chunk_tokens,
            tuple(page_ids),
            slot_id,
            tuple(stage.agent.endpoint for stage in self.stages),
            sends_rest=True,
        )

    def destination(
        self,
        source: SourceTerms,
        page_ids: Sequence[int],
        *,
        session_id: str = "s",
        epoch: int = 0,
        nonce: int = 7,
        slot_id: int = 1,
    ) -> DestinationTerms:
        """Return the terms of a handoff's destination."""
        return plan_destination(
            source,
            session_id=session_id,
            epoch=epoch,
            tag_base=nonce << 32 | epoch << 24,
            key=new_key(),
            page_ids=page_ids,
            slot_id=slot_id,
            stages=[stage.agent.endpoint for stage in self.stages],
            specs=self.specs,
        )

    def open_receive(self, source: SourceTerms, destination: DestinationTerms) -> None:
        for stage in self.stages:
            stage.agent.open_receive(source, destination)
        for stage in self.stages:
            stage.log.wait(
                destination.session_id,
                StageSessionState.OPEN,
                StageSessionState.FAILED,
                epoch=destination.epoch,
            )

    def send(
        self, source: SourceTerms, destination: DestinationTerms, *, request_key: int = 1
    ) -> None:
        """Announce, open and release everything."""
        self.open_send(source, destination, request_key=request_key)
        self.layers_done(source.num_tokens, request_key=request_key)

    def open_send(
        self, source: SourceTerms, destination: DestinationTerms, *, request_key: int = 1
    ) -> None:
        for stage in self.stages:
            stage.agent.expect_send(request_key, source.num_tokens)
            stage.agent.open_send(request_key, source, destination)

    def layers_done(self, num_tokens: int, *, request_key: int = 1) -> None:
        for stage in self.stages:
            for layer_id in stage.memory.geometry.layers:
                stage.agent.layer_done(request_key, layer_id, num_tokens)

    def wait(
        self, session_id: str, *states: StageSessionState, epoch: int = 0
    ) -> list[StageSessionEvent]:
        return [stage.log.wait(session_id, *states, epoch=epoch) for stage in self.stages]

    def close(self, session_id: str) -> None:
        for stage in self.stages:
            stage.agent.close(session_id)

    def shutdown(self) -> None:
        drained = [stage.agent.shutdown(60.0) for stage in self.stages]
        assert all(drained), drained

    def records(
        self, kinds: Collection[CacheKind], indices: Sequence[int]
    ) -> dict[tuple[int, CacheKind], Bytes]:
        """Copy these records of every layer, from the stage that has it."""
        return {
            key: array[list(indices)].copy()
            for stage in self.stages
            for key, array in stage.memory.arrays.items()
            if key[1] in kinds
        }


def assert_handed_over(
    source: Pool,
    dest: Pool,
    source_pages: Sequence[int],
    dest_pages: Sequence[int],
    source_slot: int = 1,
    dest_slot: int = 1,
) -> None:
    """Check that every record of the request is at its destination and that no other byte there has
    changed."""
    paged = {kind for kind in CacheKind if kind.is_paged}
    slots = set(CacheKind) - paged
    for kinds, theirs, ours in (
        (paged, source_pages, dest_pages),
        (slots, [source_slot], [dest_slot]),
    ):
        sent, landed = source.records(kinds, theirs), dest.records(kinds, ours)
        assert sent.keys() == landed.keys()
        for key, records in sent.items():
            assert np.array_equal(records, landed[key]), key
        for stage in dest.stages:
            for (layer_id, kind), array in stage.memory.arrays.items():
                if kind in kinds:
                    others = np.delete(array, list(ours), axis=0)
                    assert not others.any(), (
                        f"layer {layer_id} {kind}: bytes outside the destination terms changed"
                    )


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll a condition that sends no report."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)
