"""A whole decode or prefill pool in this process: real models, pools, loop and stages over in-process channels."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from decode.scheduler import DecodeLimits, DecodeScheduler, Drawn, Event, Failed, Finished
from engine.attention.cpu import CpuAttention
from engine.loop import EngineLoop
from engine.memory.layout import CacheKind, PoolGeometry
from engine.memory.pages import PageAllocator
from engine.memory.pools import StagePools
from engine.memory.slots import SlotAllocator
from engine.numerics import Numerics
from engine.pipeline.executor import StageExecutor
from engine.pipeline.inprocess import InProcessChannel
from engine.pipeline.stages import FollowerStage, HeadStage, Pipeline, SingleStage
from engine.recurrent.cpu import CpuRecurrent
from engine.request import DrawnToken, Request
from engine.sampling.sampler import sample
from engine.stages import LayerRange, get_pp_indices
from models.loader import ModelDescription
from runtime.clock import SystemClock
from runtime.errors import PeerLostError


def build_executor(description: ModelDescription, layers: LayerRange, *, page_size: int, num_pages: int,
                   num_slots: int) -> tuple[StageExecutor, StagePools]:
    """One stage; its pools hold NaN, so that a read of what was never written shows."""
    pools = StagePools(PoolGeometry(page_size, num_pages, num_slots, layers, description.cache_specs(page_size)),
                       poison=True)
    geometry = description.attention_geometry(page_size)
    assert geometry is not None
    executor = StageExecutor(
        model=description.load_stage(layers, numerics=Numerics.EXACT),
        attention=CpuAttention(kv_pools=pools.of_kind(CacheKind.KV), geometry=geometry, numerics=Numerics.EXACT),
        recurrent=CpuRecurrent(conv_pools=pools.of_kind(CacheKind.CONV), state_pools=pools.of_kind(CacheKind.STATE),
                               numerics=Numerics.EXACT))
    return executor, pools


@contextmanager
def pipeline(description: ModelDescription, size: int, *, page_size: int, num_pages: int, num_slots: int,
             partition: str | None = None) -> Iterator[Pipeline]:
    """A pipeline of `size` stages; those behind the head run in threads of their own."""
    ranges = [get_pp_indices(description.facts.num_layers, rank, size, partition) for rank in range(size)]
    executors = [build_executor(description, layers, page_size=page_size, num_pages=num_pages, num_slots=num_slots)[0]
                 for layers in ranges]
    if size == 1:
        yield SingleStage(executors[0], sample)
        return
    channels = InProcessChannel.pool(size)
    followers = [FollowerStage(executors[rank], sample, channels[rank], rank=rank, size=size)
                 for rank in range(1, size)]
    threads = [threading.Thread(target=_serve, args=(follower,), daemon=True) for follower in followers]
    for thread in threads:
        thread.start()
    try:
        yield HeadStage(executors[0], channels[0], size=size)
    finally:
        for channel in channels:
            channel.close()
        for thread in threads:
            thread.join(5)


def _serve(follower: FollowerStage) -> None:
    try:
        while True:
            follower.step(5)
    except PeerLostError:
        return


@dataclass
class Answer:
    """What one request got; `done` is set by its last event."""

    tokens: list[DrawnToken] = field(default_factory=list)
    finished: Finished | None = None
    failed: Failed | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def emit(self, event: Event) -> None:
        if isinstance(event, Drawn):
            self.tokens.append(event.token)
        else:
            self.finished = event if isinstance(event, Finished) else None
            self.failed = event if isinstance(event, Failed) else None
            self.done.set()


def call(loop: EngineLoop, command: Callable[[], None]) -> None:
    """Run `command` on the loop's thread and wait for it."""
    done = threading.Event()
    loop.post(lambda: (command(), done.set()))
    assert done.wait(10)


@dataclass
class LocalPool:
    loop: EngineLoop
    scheduler: DecodeScheduler

    def generate(self, requests: list[Request], timeout_s: float = 60) -> list[Answer]:
        """Submit all at once and wait for every answer."""
        answers = [Answer() for _ in requests]

        def submit() -> None:
            for request, answer in zip(requests, answers, strict=True):
                self.scheduler.submit_local(request, answer.emit)

        call(self.loop, submit)
        for answer in answers:
            assert answer.done.wait(timeout_s), "a request did not end"
        return answers


@contextmanager
def local_pool(description: ModelDescription, size: int = 1, *, page_size: int = 16, num_pages: int = 64,
               max_running: int = 8, chunk_tokens: int = 128, partition: str | None = None) -> Iterator[LocalPool]:
    """Generates without a handoff: the reference of every topology."""
    facts = description.facts
    needs_slots = any(not spec.kind.is_paged for spec in description.cache_specs(page_size))
    num_slots = max_running + 1 if needs_slots else 0
    scheduler = DecodeScheduler(
        pages=PageAllocator(num_pages), slots=SlotAllocator(num_slots),
        limits=DecodeLimits(page_size=page_size, grid=facts.chunk_grid, depth=size, max_running=max_running,
                            max_context_tokens=min(facts.max_context_tokens, (num_pages - 1) * page_size),
                            chunk_tokens=chunk_tokens, growth_tokens=page_size),
        clock=SystemClock())
    loop = EngineLoop(scheduler)
    with pipeline(description, size, page_size=page_size, num_pages=num_pages, num_slots=num_slots,
                  partition=partition) as stages:
        loop.start()
        loop.post(lambda: loop.attach(stages))
        try:
            yield LocalPool(loop, scheduler)
        finally:
            loop.stop()
