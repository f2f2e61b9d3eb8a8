"""Handoff of a stage: its transfer agent over host or pinned memory, and layer completion."""

from collections.abc import Callable

import torch

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.numerics import HOST
from engine.memory.layout import PoolGeometry
from engine.memory.pools import StagePools
from engine.memory.staging import CopyQueue, CudaCopies, DevicePools, PinnedStaging
from engine.pipeline.stage_executor import LayerObserver
from runtime.clock import SystemClock
from transfer.agent.agent import TransferAgent
from transfer.agent.prompts import DeviceEvent
from transfer.plan.copy_plan import MAX_RUN_BYTES
from transfer.plan.handoff_terms import StageSessionEvent
from transfer.transport.device import DeviceTransport, Route
from transfer.transport.protocol import Transport

LayerMark = Callable[[], DeviceEvent]
"""Records an event after the work that was given to the device so far."""


def layer_observer(agent: TransferAgent, mark: LayerMark | None = None) -> LayerObserver:
    """Return an observer that reports the completed layers of a prefill stage to its agent.

    It reports the tokens of each layer, including cached ones. The first layer of a batch also
    names its requests, because later stages have no other sign of them.

    On a device a launched layer is not complete. Then `mark` is given, and the agent waits for its
    event, one per batch and layer.
    """
    latest: ForwardBatch | None = None

    def observe(batch: ForwardBatch, layer_id: int) -> None:
        nonlocal latest
        if batch.mode is not ForwardMode.PREFILL:
            return
        event = None if mark is None else mark()
        is_first = batch is not latest
        latest = batch
        for key, context_len, query_len in zip(
            batch.request_keys, batch.context_lens, batch.query_lens, strict=True
        ):
            if is_first:
                agent.expect_send(key)
            agent.layer_done(key, layer_id, context_len + query_len, after=event)

    return observe


STAGING_BYTES = 64 << 20
MIN_BUFFERS = 4


def build_agent(
    pools: StagePools,
    device: torch.device,
    transport: Transport,
    *,
    incarnation: str,
    on_event: Callable[[StageSessionEvent], None],
    route: Route = Route.PINNED,
) -> TransferAgent:
    """Return the agent of a stage, not started.

    `transport` moves host bytes, and with a direct `route` the device's bytes as well.

    Raises:
        ConfigError: memory cannot be pinned.
    """
    if device != HOST:
        return build_device_agent(
            pools,
            CudaCopies(device),
            transport,
            incarnation=incarnation,
            on_event=on_event,
            route=route,
            pinned=True,
            mark=layer_mark(device),
        )
    return TransferAgent(
        memory=pools,
        transport=transport,
        clock=SystemClock(),
        incarnation=incarnation,
        on_event=on_event,
    )


def build_device_agent(
    pools: StagePools,
    copies: CopyQueue,
    transport: Transport,
    *,
    incarnation: str,
    on_event: Callable[[StageSessionEvent], None],
    pinned: bool,
    route: Route = Route.PINNED,
    mark: LayerMark | None = None,
) -> TransferAgent:
    """Return an agent for pools that are accessible only through `copies`.

    Its thread enters the device before it does anything else. Without `mark` cached entries are
    taken as computed.
    """
    clock = SystemClock()
    buffer_bytes = max_message_bytes(pools.geometry)
    staging = PinnedStaging(
        copies,
        num_buffers=max(MIN_BUFFERS, STAGING_BYTES // buffer_bytes),
        buffer_bytes=buffer_bytes,
        pinned=pinned,
    )
    return TransferAgent(
        memory=DevicePools(pools),
        clock=clock,
        incarnation=incarnation,
        on_event=on_event,
        transport=DeviceTransport(transport, staging, clock, route=route),
        on_thread_start=staging.enter_thread,
        mark=mark or (lambda: None),
    )


def max_message_bytes(geometry: PoolGeometry) -> int:
    """Return the largest bytes of one item of a handoff from or to these pools."""
    return max([MAX_RUN_BYTES, *(spec.record_bytes for spec in geometry.local_specs())])


def layer_mark(device: torch.device) -> LayerMark | None:
    """Return a function that marks the device's queue of work.

    Return None on the host, where a computed layer is complete.
    """
    if device == HOST:
        return None
    return lambda: torch.cuda.current_stream(device).record_event()
