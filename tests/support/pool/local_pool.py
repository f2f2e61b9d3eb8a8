"""A whole decode or prefill pool in this process: real models, pools, loop and stages over
in-process channels."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, cycle

from torch import Tensor

from decode.entry import DecodeEntryEvent, DecodeLimits, Finished, Generated
from decode.scheduler import DecodeScheduler
from decode.speculation import MAX_DRAFT_TOKENS, DraftLength
from engine.backends.cpu.attention import CpuAttention
from engine.backends.cpu.latent import CpuLatentAttention
from engine.backends.cpu.recurrent import CpuRecurrent
from engine.backends.recurrent_batch import SnapshotRecurrent
from engine.backends.recurrent_tree import TreeRecurrent
from engine.core.batch import ForwardBatch
from engine.core.draft_trees import SpecInfo
from engine.core.layer_range import ONLY_RANK, LayerRange, TensorRank, get_pp_indices
from engine.core.numerics import Numerics
from engine.core.request import Request, SampledToken
from engine.loop import EngineLoop, Scheduler
from engine.memory.layout import CacheKind, PoolGeometry
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.memory.pools import StagePools
from engine.pipeline.ahead import AheadStage
from engine.pipeline.channel import FrameChannel
from engine.pipeline.overlap import Overlap
from engine.pipeline.ranks import StageRanks
from engine.pipeline.stage_executor import StageExecutor
from engine.pipeline.stages import FollowerStage, HeadStage, Pipeline, SingleStage
from engine.pipeline.tensor_channel import TensorChannel
from engine.sampling.guided import GuidedSampler
from engine.speculative.contracts.config import Proposer
from engine.speculative.contracts.drafter import Drafter
from models.loader import ModelDescription
from pool.request.entry import Failed
from runtime.clock import SystemClock
from runtime.errors import IntegrityError, PeerLostError
from testing.inprocess_channel import InProcessChannel


@dataclass(frozen=True)
class Speculation:
    """How a pool speculates: `drafter` is built for the last stage, given its number of pages, or
    `over_pools`, given the target's."""

    drafter: Callable[[int], Drafter | None]
    num_draft_tokens: int
    capture_layers: frozenset[int] = frozenset()
    draft_length: DraftLength = lambda num_running: MAX_DRAFT_TOKENS
    poisons_leftovers: bool = False  # see `Leftovers`
    over_pools: Callable[[StagePools], Drafter] | None = None
    proposers: tuple[Proposer, ...] = ("model",)


SUFFIXES = Speculation(lambda num_pages: None, 5, proposers=("suffix",))


def build_executor(
    description: ModelDescription,
    layers: LayerRange,
    *,
    page_size: int,
    num_pages: int,
    num_slots: int,
    num_scratch: int = 2,
    speculation: Speculation | None = None,
    ranks: StageRanks | None = None,
    overlap: Overlap | None = None,
) -> tuple[StageExecutor, StagePools]:
    """Build one stage, or a rank of it; its pools hold NaN, so that a read of anything unwritten
    shows."""
    own = ONLY_RANK if ranks is None else ranks.own
    description = description.of_rank(own)
    ranks = ranks if own.size > 1 else None
    pools = StagePools(
        PoolGeometry(
            page_size,
            num_pages,
            num_slots,
            layers,
            description.cache_specs(page_size),
            own.attention,
        ),
        poison=True,
    )
    geometry, exact = description.attention_geometry(page_size), Numerics.EXACT
    kv, conv, state = (
        pools.of_kind(kind) for kind in (CacheKind.KV, CacheKind.CONV, CacheKind.STATE)
    )
    latent_geometry = description.latent_geometry(page_size)
    latent = (
        None
        if latent_geometry is None
        else CpuLatentAttention(
            latent_pools=pools.of_kind(CacheKind.LATENT),
            index_pools=pools.of_kind(CacheKind.INDEX_KEY),
            geometry=latent_geometry,
        )
    )
    attention = (
        None
        if geometry is None
        else CpuAttention(
            kv_pools=kv, window_pools=pools.of_kind(CacheKind.WINDOW), geometry=geometry
        )
    )
    recurrent = CpuRecurrent(conv_pools=conv, state_pools=state, numerics=exact)
    if speculation is None:
        snapshots = (
            SnapshotRecurrent(recurrent, conv_pools=conv, state_pools=state) if state else None
        )
        windows = attention if pools.of_kind(CacheKind.WINDOW) else None
        model = description.load_stage(layers, numerics=exact, ranks=ranks)
        return StageExecutor(
            model=model,
            attention=attention,
            latent_attention=latent,
            recurrent=snapshots or recurrent,
            caches=[cache for cache in (windows, snapshots) if cache is not None],
            overlap=overlap,
        ), pools
    model = description.load_stage(
        layers, numerics=exact, capture_layers=speculation.capture_layers, ranks=ranks
    )
    leftovers = Leftovers(pools, speculation.num_draft_tokens + 1)

    def over_nodes(convs: Mapping[int, Tensor], states: Mapping[int, Tensor]) -> CpuRecurrent:
        leftovers.nodes += [*convs.values(), *states.values()]
        return CpuRecurrent(conv_pools=convs, state_pools=states, numerics=exact)

    states = TreeRecurrent(
        slots=recurrent,
        conv_pools=conv,
        state_pools=state,
        max_nodes=speculation.num_draft_tokens + 1,
        num_scratch=num_scratch,
        backend_over=over_nodes,
    )
    snapshots = SnapshotRecurrent(states, conv_pools=conv, state_pools=state) if state else None
    poisoned = leftovers if speculation.poisons_leftovers else None
    found = (attention, latent, states, poisoned, snapshots)
    return StageExecutor(
        model=model,
        attention=attention,
        latent_attention=latent,
        recurrent=snapshots or states,
        overlap=overlap,
        caches=[cache for cache in found if cache is not None],
    ), pools


@dataclass
class Leftovers:
    """NaN in place of rejected entries once a batch's rows have committed: entries after their
    tokens and states of nodes. Everything that padding reads becomes NaN, too."""

    pools: StagePools
    max_nodes: int
    nodes: list[Tensor] = field(default_factory=list)

    def commit(self, batch: ForwardBatch) -> None:
        size = self.pools.geometry.page_size
        for row, context_len in enumerate(batch.context_lens):
            pages = batch.page_tables[row].tolist()
            for kind in (kind for kind in CacheKind if kind.is_paged):
                for pool in self.pools.of_kind(kind).values():
                    pool[0] = math.nan
                    for place in range(context_len // size, len(pages)):
                        kept = max(0, context_len - place * size)
                        pool[pages[place]].narrow(-2, kept, size - kept).fill_(math.nan)
            for scratch in self.nodes:
                first = self._scratch_of(batch, row) * self.max_nodes
                scratch[first : first + self.max_nodes] = math.nan
        for kind in (CacheKind.CONV, CacheKind.STATE):
            for pool in self.pools.of_kind(kind).values():
                pool[0] = math.nan

    def _scratch_of(self, batch: ForwardBatch, row: int) -> int:
        return batch.spec_info.rows[row].scratch if isinstance(batch.spec_info, SpecInfo) else 0


@contextmanager
def pipeline(
    description: ModelDescription,
    size: int,
    *,
    page_size: int,
    num_pages: int,
    num_slots: int,
    num_scratch: int = 2,
    partition: str | None = None,
    speculation: Speculation | None = None,
    connected: Callable[[int], Sequence[FrameChannel]] = InProcessChannel.pool,
    tp: int = 1,
    dp: int = 1,
    overlaps: Sequence[Overlap] = (),
    steps_ahead: bool = False,
) -> Iterator[tuple[Pipeline, tuple[StagePools, ...]]]:
    """Return a pipeline of `size` stages of `tp` ranks, and the memory of each; those after the
    head run in their own threads. `overlaps`: one of each process that runs batches in halves."""
    ranges = [
        get_pp_indices(description.facts.num_layers, rank, size, partition) for rank in range(size)
    ]
    num_processes = size * tp
    ranks = [
        StageRanks(
            TensorRank(rank % tp, tp, dp),
            stage=rank // tp,
            while_under_way=overlaps[rank].pass_turn if overlaps else lambda: None,
        )
        for rank in range(num_processes)
    ]
    executors, memory = zip(
        *(
            build_executor(
                description,
                ranges[rank // tp],
                page_size=page_size,
                num_pages=num_pages,
                num_slots=num_slots,
                num_scratch=num_scratch,
                speculation=speculation,
                ranks=ranks[rank],
                overlap=overlaps[rank] if overlaps else None,
            )
            for rank in range(num_processes)
        ),
        strict=True,
    )
    drafters = {
        rank: None
        if speculation is None
        else speculation.over_pools(memory[rank])
        if speculation.over_pools is not None
        else speculation.drafter(num_pages)
        for rank in range(num_processes - tp, num_processes)
        if ranks[rank].own.attention.rank == 0
    }
    if num_processes == 1:
        single = SingleStage(executors[0], GuidedSampler(None), drafters[0])
        ahead = AheadStage(single, executors[0]) if steps_ahead else None
        try:
            yield ahead or single, memory
        finally:
            if ahead is not None:
                ahead.close()
        return
    channels = [TensorChannel(frames, max_bytes=1 << 27) for frames in connected(num_processes)]
    for each, channel in zip(ranks, channels, strict=True):
        each.use(channel)
    followers = [
        FollowerStage(
            executors[rank],
            GuidedSampler(None),
            channels[rank],
            rank=rank,
            size=num_processes,
            drafter=drafters.get(rank),
            ranks=ranks[rank],
        )
        for rank in range(1, num_processes)
    ]
    threads = [
        threading.Thread(target=_serve, args=(follower, channel), daemon=True)
        for follower, channel in zip(followers, channels[1:], strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield (
            (
                HeadStage(executors[0], channels[0], size=size, ranks=ranks[0])
                if size > 1
                else SingleStage(
                    executors[0], GuidedSampler(None), drafters[0], ranks[0], channels[0]
                )
            ),
            memory,
        )
    finally:
        for channel in channels:
            channel.close()
        for thread in threads:
            thread.join(60)


def _serve(follower: FollowerStage, channel: TensorChannel) -> None:
    """Serve until the pool breaks, which the others then learn as they do from the membership."""
    try:
        while True:
            follower.step(5)
    except (PeerLostError, IntegrityError):
        channel.close()


@dataclass
class Answer:
    """What one request got; `done` is set by its last event."""

    tokens: list[SampledToken] = field(default_factory=list)
    finished: Finished | None = None
    failed: Failed | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def emit(self, event: DecodeEntryEvent) -> None:
        if isinstance(event, Generated):
            self.tokens += event.tokens
        else:
            self.finished = event if isinstance(event, Finished) else None
            self.failed = event if isinstance(event, Failed) else None
            self.done.set()


def call(loop: EngineLoop, command: Callable[[], None]) -> None:
    """Run `command` on the loop's thread and wait for it."""
    done = threading.Event()

    def run() -> None:
        command()
        done.set()

    loop.post(run)
    assert done.wait(60)


@dataclass
class LocalPool:
    loop: EngineLoop
    schedulers: tuple[DecodeScheduler, ...]  # one of each data rank
    memory: tuple[StagePools, ...]  # of each process

    @property
    def scheduler(self) -> DecodeScheduler:
        """Return the first scheduler, the only one without data ranks."""
        return self.schedulers[0]

    def generate(self, requests: list[Request], timeout_s: float = 240) -> list[Answer]:
        """Submit all at once, to the data ranks in turn, and wait for every output."""
        answers = [Answer() for _ in requests]

        def submit() -> None:
            for scheduler, request, answer in zip(
                cycle(self.schedulers), requests, answers, strict=False
            ):
                scheduler.submit_local(request, answer.emit)

        call(self.loop, submit)
        for answer in answers:
            assert answer.done.wait(timeout_s), "a request did not end"
        return answers


@contextmanager
def local_pool(
    description: ModelDescription,
    size: int = 1,
    *,
    page_size: int = 16,
    num_pages: int = 64,
    max_running: int = 8,
    max_held: int = 0,
    chunk_tokens: int = 128,
    partition: str | None = None,
    speculation: Speculation | None = None,
    connected: Callable[[int], Sequence[FrameChannel]] = InProcessChannel.pool,
    tp: int = 1,
    dp: int = 1,
    overlaps: Sequence[Overlap] = (),
    steps_ahead: bool = False,
    replay_tokens: int = 5,
) -> Iterator[LocalPool]:
    """Run a pool that generates without a handoff: the reference of every topology."""
    facts = description.facts
    needs_slots = any(not spec.kind.is_paged for spec in description.cache_specs(page_size))
    num_slots = (max_held or max_running) + 1 if needs_slots else 0
    num_scratch = max_running + 1 if needs_slots and speculation is not None else 0
    limits = DecodeLimits(
        page_size=page_size,
        grid=facts.chunk_grid,
        depth=size,
        max_running=max_running,
        max_held=max_held,
        chunk_tokens=chunk_tokens,
        max_context_tokens=min(facts.max_context_tokens, (num_pages - 1) * page_size),
        growth_tokens=page_size,
        has_states=needs_slots,
        replay_tokens=replay_tokens,
        steps_ahead=steps_ahead,
        num_draft_tokens=0 if speculation is None else speculation.num_draft_tokens,
        proposers=() if speculation is None else speculation.proposers,
    )
    keys = count(1)
    schedulers = tuple(
        DecodeScheduler(
            pages=PageAllocator(num_pages),
            slots=SlotAllocator(num_slots),
            limits=limits,
            clock=SystemClock(),
            scratch=SlotAllocator(num_scratch, name="states of trees"),
            data_rank=rank,
            keys=keys,
        )
        for rank in range(dp)
    )
    for scheduler in schedulers:
        scheduler.draft_length = (
            scheduler.draft_length if speculation is None else speculation.draft_length
        )
    with (
        pipeline(
            description,
            size,
            page_size=page_size,
            num_pages=num_pages,
            num_slots=num_slots,
            num_scratch=num_scratch,
            partition=partition,
            speculation=speculation,
            connected=connected,
            tp=tp,
            dp=dp,
            overlaps=overlaps,
            steps_ahead=steps_ahead,
        ) as (stages, memory),
        running(stages, *schedulers) as loop,
    ):
        yield LocalPool(loop, schedulers, memory)


@contextmanager
def running(stages: Pipeline, *schedulers: Scheduler) -> Iterator[EngineLoop]:
    """Run a loop of these schedulers, one of each data rank."""
    loop = EngineLoop(*schedulers)
    loop.start()
    loop.post(lambda: loop.attach(stages))
    try:
        yield loop
    finally:
        loop.stop()
