"""A device without one: pools whose bytes only copies reach, copies and events that end when the
test says so.

Its pools are CPU tensors, but every transport refuses a tensor: a byte that moved has crossed a
staging buffer. What is to be copied is poisoned until it was, so that a read that is too early sends
nonsense.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor

from engine.core.layer_range import LayerRange
from engine.core.numerics import HOST
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry
from engine.memory.pools import StagePools
from engine.memory.staging import CudaCopies, DevicePools, PinnedStaging
from runtime.clock import SystemClock
from tests.support.transfer.handoff import EventLog
from transfer.agent.agent import AgentLimits, TransferAgent
from transfer.agent.prompts import DeviceEvent
from transfer.plan.copy_plan import plan_destination
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms
from transfer.transport.authenticator import new_key
from transfer.transport.device import DeviceTransport, Route
from transfer.transport.protocol import Transport

POISON = 0xEE


class HandEvent:
    """An event that passes on command. `num_queries`: how often it was queried."""

    def __init__(self, *, passed: bool = False) -> None:
        self.passed = passed
        self.num_queries = 0

    def query(self) -> bool:
        self.num_queries += 1
        return self.passed


class HandCopies:
    """A `CopyQueue` whose copies run on command; with `free` automatically, each after one query,
    as on an idle device."""

    def __init__(self, *, free: bool = True) -> None:
        self.free = free
        self.num_threads = 0
        self.num_copies = 0
        self.waiting: deque[Callable[[], None]] = deque()

    def enter_thread(self) -> None:
        self.num_threads += 1

    def settle(self) -> None:
        pass

    def copy(self, target: Tensor, source: Tensor) -> "_Copy":
        self.num_copies += 1
        copy = _Copy(self, target, source)
        self.waiting.append(copy.run)
        return copy

    def run(self, num: int | None = None) -> None:
        """Run the next `count` copies, or all."""
        for _ in range(len(self.waiting) if num is None else num):
            self.waiting.popleft()()


class _Copy:
    def __init__(self, queue: HandCopies, target: Tensor, source: Tensor) -> None:
        self._queue = queue
        self._target = target
        self._source = source
        self._is_over = False
        self._was_asked = False
        target.fill_(POISON)

    def run(self) -> None:
        self._target.copy_(self._source)
        self._is_over = True

    def query(self) -> bool:
        if not self._is_over and self._queue.free and self._was_asked:
            while not self._is_over:
                self._queue.run(1)
        self._was_asked = True
        return self._is_over


class Disguised(Tensor):
    """Host memory that looks like a CUDA device's to code that takes its address."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": tuple(self.shape),
            "typestr": "|u1",
            "data": (self.data_ptr(), False),
            "version": 3,
            "strides": None,
        }


class DisguisedPools(DevicePools):
    def view(
        self,
        layer_id: int,
        kind: CacheKind,
        first_index: int,
        count: int,
        part: slice | None = None,
    ) -> Tensor:
        return super().view(layer_id, kind, first_index, count, part).as_subclass(Disguised)


class DeviceStage:
    """One stage whose pools are on the device: pools, staging, agent, and its reports."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        specs: tuple[CacheSpec, ...],
        *,
        num_buffers: int = 4,
        copies: HandCopies | None = None,
        page_size: int = 4,
        num_pages: int = 32,
        num_slots: int = 8,
        buffer_bytes: int = 1 << 14,
        limits: AgentLimits | None = None,
        copy_limit_s: float = 10.0,
        device: torch.device = HOST,
        route: Route = Route.PINNED,
        mark: Callable[[], DeviceEvent | None] = lambda: None,
    ) -> None:
        """Create the stage. `device` is a real one, which then makes its own copies.

        With a direct route and no device, the transport gets addresses of host memory as if they
        were a device's.
        """
        num_layers = max(spec.layer_id for spec in specs) + 1
        clock = SystemClock()
        self.specs, self.page_size, self.log = specs, page_size, EventLog()
        self.copies = copies or HandCopies()
        self.pools = StagePools(
            PoolGeometry(page_size, num_pages, num_slots, LayerRange(0, num_layers), specs),
            device=str(device),
        )
        self.staging = PinnedStaging(
            self.copies if device == HOST else CudaCopies(device),
            num_buffers=num_buffers,
            buffer_bytes=buffer_bytes,
            pinned=device != HOST,
        )
        self.transport = DeviceTransport(
            transport, self.staging, clock, route=route, copy_limit_s=copy_limit_s
        )
        disguised = route is Route.DIRECT and device == HOST
        memory = DisguisedPools(self.pools) if disguised else DevicePools(self.pools)
        self.agent = TransferAgent(
            memory=memory,
            transport=self.transport,
            clock=clock,
            incarnation=f"{name}-0",
            on_event=self.log,
            limits=limits,
            on_thread_start=self.staging.enter_thread,
            mark=mark,
        )
        self._nonces = count(1000)
        self.agent.start()

    def randomize(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for spec in self.specs:
            tensor = self.pools.of_kind(spec.kind)[spec.layer_id]
            data = torch.randint(
                0,
                256,
                (tensor.numel() * tensor.element_size(),),
                dtype=torch.uint8,
                generator=generator,
            )
            tensor.view(-1).view(torch.uint8).copy_(data)

    def bytes_of(self, pages: Sequence[int], slot: int = 1) -> list[bytes]:
        """Return the bytes of a request's records, by layer and kind."""
        return [
            self.pools.records(spec.layer_id, spec.kind, index, 1).cpu().numpy().tobytes()
            for spec in self.specs
            for index in (pages if spec.kind.is_paged else [slot])
        ]

    def terms(
        self, page_ids: Sequence[int], num_tokens: int, *, chunk_tokens: int = 8
    ) -> SourceTerms:
        return SourceTerms(
            "c",
            "text",
            self.page_size,
            num_tokens,
            chunk_tokens,
            tuple(page_ids),
            1,
            (self.agent.endpoint,),
        )

    def destination(
        self, source: SourceTerms, page_ids: Sequence[int], *, session_id: str = "s"
    ) -> DestinationTerms:
        return plan_destination(
            source,
            session_id=session_id,
            epoch=0,
            tag_base=next(self._nonces) << 32,
            key=new_key(),
            page_ids=page_ids,
            slot_id=1,
            stages=[self.agent.endpoint],
            specs=self.specs,
        )

    def open_send(
        self, source: SourceTerms, destination: DestinationTerms, *, request_key: int = 1
    ) -> None:
        self.agent.expect_send(request_key, source.num_tokens)
        self.agent.open_send(request_key, source, destination)

    def layers_done(self, num_tokens: int, *, request_key: int = 1) -> None:
        for layer_id in self.pools.geometry.layers:
            self.agent.layer_done(request_key, layer_id, num_tokens)
