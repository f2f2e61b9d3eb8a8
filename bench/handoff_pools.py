"""Processes of the handoff benchmark: real pools and agents without the other parts of a worker."""

import os
import random
import secrets
import threading
import time
from multiprocessing.connection import Connection

import torch

from engine.core.layer_range import LayerRange
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry
from engine.memory.pools import StagePools
from pool.stage.handoff import build_agent
from runtime.clock import SystemClock
from runtime.errors import ConfigError, HandoffError
from transfer.plan.copy_plan import plan_destination
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageSessionEvent,
    StageSessionState,
)
from transfer.transport.authenticator import new_key
from transfer.ucx.settings import TransportProfile
from transfer.ucx.transport import UcxTransport

NUM_LAYERS = 28
NUM_KV_HEADS = 8
HEAD_DIM = 128
NUM_TOKENS = 2048
PAGE_SIZE = 64
NUM_PAGES = 2 * NUM_TOKENS // PAGE_SIZE
TIMEOUT_S = 120


class _HandoffEnd:
    """Pools, an agent, and the reports of the open session with their times."""

    def __init__(self, profile: TransportProfile, device: str, incarnation: str) -> None:
        specs = tuple(
            CacheSpec(layer_id, CacheKind.KV, (2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM), "bfloat16", 2)
            for layer_id in range(NUM_LAYERS)
        )
        self.pools = StagePools(
            PoolGeometry(PAGE_SIZE, NUM_PAGES + 1, 0, LayerRange(0, NUM_LAYERS), specs),
            device=device,
        )
        for tensor in self.pools.kv.values():
            tensor.copy_(torch.randn(tensor.shape))  # also touches every page of memory
        self._reports: dict[StageSessionState, tuple[StageSessionEvent, float]] = {}
        self._changed = threading.Condition()
        self.agent = build_agent(
            self.pools,
            torch.device(device),
            UcxTransport(profile=profile, clock=SystemClock()),
            incarnation=incarnation,
            on_event=self._on_event,
        )
        self.agent.start()

    def _on_event(self, event: StageSessionEvent) -> None:
        with self._changed:
            self._reports[event.state] = (event, time.monotonic())
            self._changed.notify_all()

    def wait(self, state: StageSessionState) -> tuple[StageSessionEvent, float]:
        """Return the report and its time, or raise HandoffError on failure or timeout."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: {state, StageSessionState.FAILED} & self._reports.keys(), TIMEOUT_S
            ):
                raise HandoffError(f"no report {state} within {TIMEOUT_S} s")
            if state not in self._reports:
                raise HandoffError(self._reports[StageSessionState.FAILED][0].error_text)
            return self._reports[state]

    def close_session(self, session_id: str) -> None:
        self.agent.close(session_id)
        self.wait(StageSessionState.DRAINED)
        self._reports.clear()


def _scattered_pages(seed: str) -> tuple[int, ...]:
    """Return the prompt's pages, in random order over the whole pool."""
    return tuple(random.Random(seed).sample(range(1, NUM_PAGES + 1), NUM_TOKENS // PAGE_SIZE))


def source_process(
    connection: Connection, profile: TransportProfile, device: str, core: int
) -> None:
    """Serve handoffs on this core until None arrives: terms, destination in, release time out."""
    os.sched_setaffinity(0, {core})
    side = _HandoffEnd(profile, device, "source")
    while (number := connection.recv()) is not None:
        terms = SourceTerms(
            "",
            "",
            PAGE_SIZE,
            NUM_TOKENS,
            NUM_TOKENS,
            _scattered_pages(f"source {number}"),
            0,
            (side.agent.endpoint,),
        )
        connection.send(terms)
        destination: DestinationTerms = connection.recv()
        side.agent.expect_send(number, NUM_TOKENS)
        side.agent.open_send(number, terms, destination)
        side.wait(StageSessionState.OPEN)
        connection.send(time.monotonic())
        for layer_id in range(NUM_LAYERS):
            side.agent.layer_done(number, layer_id, NUM_TOKENS)
        side.wait(StageSessionState.COMPLETE)
        side.agent.close_request(number)
        side.close_session(destination.session_id)
    side.agent.shutdown(5.0)


class Destination:
    """The receiving side, in this process."""

    def __init__(self, profile: TransportProfile, device: str) -> None:
        self._side = _HandoffEnd(profile, device, "destination")
        self.num_bytes = 0

    def handoff(self, source: Connection, number: int) -> float:
        """Run one handoff; return its GB/s (1e9 bytes), from release to check."""
        source.send(number)
        terms: SourceTerms = source.recv()
        destination = plan_destination(
            terms,
            session_id=f"s{number}",
            epoch=0,
            tag_base=secrets.randbits(64),
            key=new_key(),
            page_ids=_scattered_pages(f"destination {number}"),
            slot_id=0,
            stages=[self._side.agent.endpoint],
            specs=self._side.pools.geometry.specs,
        )
        self._side.agent.open_receive(terms, destination)
        self._side.wait(StageSessionState.OPEN)
        source.send(destination)
        released_s: float = source.recv()
        event, checked_s = self._side.wait(StageSessionState.COMPLETE)
        self.num_bytes = event.num_bytes
        self._side.close_session(destination.session_id)
        return event.num_bytes / (checked_s - released_s) / 1e9

    def close(self) -> None:
        self._side.agent.shutdown(5.0)


def copy_gbps(device: str) -> float:
    """Return the GB/s (1e9 bytes) of one copy of 64 MiB from the device to pinned memory."""
    source = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    target = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    target.copy_(source)
    torch.cuda.synchronize()
    began_s = time.monotonic()
    target.copy_(source)  # waits for completion
    return len(source) / (time.monotonic() - began_s) / 1e9


def check_device(device: str) -> None:
    """Raise ConfigError unless torch can use the device."""
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"bench.handoff on {device} needs a CUDA device", field="device")
