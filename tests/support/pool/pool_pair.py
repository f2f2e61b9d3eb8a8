"""A prefill and a decode pool in this process, of any stages and ranks, and handoffs between them:
real models, schedulers, loops, stages and transfer agents; their channels and transport are in
memory."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import NamedTuple

from decode.request_memory import Reservation
from engine.core.request import Request, SampledToken
from engine.loop import EngineLoop
from engine.memory.layout import CacheSpec
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.memory.pools import StagePools
from models.loader import ModelDescription
from pool.request.entry import Failed
from prefill.prompts import FirstToken, PrefillEntryEvent, PrefillLimits, Started
from prefill.scheduler import PrefillScheduler
from runtime.clock import SystemClock
from testing.memory_transport import MemoryNetwork
from tests.support.pool.local_pool import (
    Answer,
    LocalPool,
    Speculation,
    call,
    local_pool,
    pipeline,
    running,
)
from tests.support.transfer.handoff import EventLog
from transfer.agent.agent import TransferAgent
from transfer.plan.copy_plan import plan_destination
from transfer.plan.handoff_terms import SourceTerms, StageSessionState
from transfer.transport.authenticator import new_key

PAGE_SIZE, NUM_PAGES, MAX_RUNNING, CHUNK_TOKENS, TIMEOUT_S = 16, 64, 8, 64, 120.0


class Layout(NamedTuple):
    """Stages of a pool, ranks of each, and data ranks that these form."""

    pp: int
    tp: int
    dp: int


@dataclass
class Prompt:
    """What a prefill pool has made of one; `done` is set by its last event."""

    key: int = 0
    started: Started | None = None
    first: FirstToken | None = None
    failed: Failed | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def emit(self, event: PrefillEntryEvent) -> None:
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, FirstToken):
            self.first = event
            self.done.set()
        elif isinstance(event, Failed):
            self.failed = event
            self.done.set()


class _Agents:
    """The transfer agents of a pool's processes."""

    def __init__(
        self, name: str, memory: Sequence[StagePools], layout: Layout, network: MemoryNetwork
    ) -> None:
        self._layout = layout
        self._all = [
            (
                log := EventLog(),
                TransferAgent(
                    memory=pools,
                    transport=network.transport(SystemClock()),
                    clock=SystemClock(),
                    incarnation=f"{name}-{rank}",
                    on_event=log,
                ),
            )
            for rank, pools in enumerate(memory)
        ]
        for _, agent in self._all:
            agent.start()

    def of(self, data_rank: int) -> list[tuple[EventLog, TransferAgent]]:
        """Return the agents of a data rank's processes, stage by stage."""
        _, tp, dp = self._layout
        return [
            each for process, each in enumerate(self._all) if process % tp * dp // tp == data_rank
        ]

    def shutdown(self) -> None:
        for _, agent in self._all:
            assert agent.shutdown(TIMEOUT_S), "bytes are still under way"


@dataclass
class PoolPair:
    specs: tuple[CacheSpec, ...]
    prefill: EngineLoop
    prompts: tuple[PrefillScheduler, ...]  # one of each data rank
    decode: LocalPool
    sources: _Agents
    dests: _Agents

    def generate(self, requests: Sequence[Request]) -> list[list[SampledToken]]:
        """Submit all at once, to each side's data ranks in turn; keys on both sides count from
        1."""
        prompts = [
            self._read(scheduler, request)
            for scheduler, request in zip(cycle(self.prompts), requests, strict=False)
        ]
        answers, reserved = [Answer() for _ in requests], list[Reservation]()
        for prompt in prompts:
            assert prompt.done.wait(TIMEOUT_S), "a prompt was not read"
            assert prompt.first is not None, prompt.failed
        call(
            self.decode.loop,
            lambda: reserved.extend(
                scheduler.reserve(request, answer.emit)
                for scheduler, request, answer in zip(
                    cycle(self.decode.schedulers), requests, answers, strict=False
                )
            ),
        )
        for request, prompt, reservation in zip(requests, prompts, reserved, strict=True):
            self._hand_over(len(request.prompt_token_ids), prompt, reservation)
        first = [prompt.first.token for prompt in prompts if prompt.first is not None]

        def join() -> None:
            for each, token in zip(reserved, first, strict=True):
                self.decode.schedulers[each.data_rank].join(each.key, token.token_id)

        call(self.decode.loop, join)
        for answer in answers:
            assert answer.done.wait(TIMEOUT_S), "a request did not end"
            assert answer.finished is not None, answer.failed
        self._check_empty()
        return [[token, *answer.tokens] for token, answer in zip(first, answers, strict=True)]

    def _read(self, scheduler: PrefillScheduler, request: Request) -> Prompt:
        prompt = Prompt()

        def submit() -> None:
            prompt.key = scheduler.submit(request, prompt.emit)

        self.prefill.post(submit)
        return prompt

    def _hand_over(self, num_tokens: int, prompt: Prompt, reservation: Reservation) -> None:
        """Hand over from the processes of the data rank that prefilled it to those that decode
        it."""
        started, session_id = prompt.started, f"s{reservation.key}"
        assert started is not None
        sources, dests = self.sources.of(started.data_rank), self.dests.of(reservation.data_rank)
        terms = SourceTerms(
            "c",
            "text",
            PAGE_SIZE,
            num_tokens,
            CHUNK_TOKENS,
            started.page_ids,
            started.slot_id,
            tuple(agent.endpoint for _, agent in sources),
        )
        destination = plan_destination(
            terms,
            session_id=session_id,
            epoch=0,
            tag_base=reservation.key << 32,
            key=new_key(),
            page_ids=reservation.prompt_page_ids,
            slot_id=reservation.slot_id,
            stages=[agent.endpoint for _, agent in dests],
            specs=self.specs,
        )
        for _, agent in dests:
            agent.open_receive(terms, destination)
        for log, _ in dests:
            log.wait(session_id, StageSessionState.OPEN, StageSessionState.FAILED)
        for _, agent in sources:
            agent.expect_send(prompt.key, num_tokens)
            agent.open_send(prompt.key, terms, destination)
            for layer_id in agent.endpoint.layers:
                agent.layer_done(prompt.key, layer_id, num_tokens)
        for log, _ in [*sources, *dests]:
            event = log.wait(session_id, StageSessionState.COMPLETE, StageSessionState.FAILED)
            assert event.state is StageSessionState.COMPLETE, event
        call(self.prefill, lambda: self.prompts[started.data_rank].release(prompt.key))

    def _check_empty(self) -> None:
        """Check that both pools hold nothing of the requests."""
        for loop, schedulers in (
            (self.prefill, self.prompts),
            (self.decode.loop, self.decode.schedulers),
        ):
            for scheduler in schedulers:
                call(loop, scheduler.on_idle)
                assert scheduler.pages.num_free == scheduler.pages.num_total
                assert scheduler.slots.num_free == scheduler.slots.num_total


@contextmanager
def pool_pair(
    description: ModelDescription,
    prefill: Layout,
    decode: Layout,
    speculation: Speculation | None = None,
) -> Iterator[PoolPair]:
    """Run two serving pools of one model."""
    specs, facts = description.cache_specs(PAGE_SIZE), description.facts
    num_slots = MAX_RUNNING + 1 if any(not spec.kind.is_paged for spec in specs) else 0
    limits = PrefillLimits(PAGE_SIZE, CHUNK_TOKENS, facts.chunk_grid, MAX_RUNNING, MAX_RUNNING)
    keys, network = count(1), MemoryNetwork()
    prompts = tuple(
        PrefillScheduler(
            pages=PageAllocator(NUM_PAGES),
            slots=SlotAllocator(num_slots),
            limits=limits,
            clock=SystemClock(),
            data_rank=rank,
            keys=keys,
        )
        for rank in range(prefill.dp)
    )
    with (
        pipeline(
            description,
            prefill.pp,
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            num_slots=num_slots,
            tp=prefill.tp,
            dp=prefill.dp,
        ) as (stages, memory),
        running(stages, *prompts) as loop,
        local_pool(
            description,
            decode.pp,
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            max_running=MAX_RUNNING,
            speculation=speculation,
            tp=decode.tp,
            dp=decode.dp,
        ) as pool,
    ):
        sides = [
            _Agents("prefill", memory, prefill, network),
            _Agents("decode", pool.memory, decode, network),
        ]
        try:
            yield PoolPair(specs, loop, prompts, pool, *sides)
        finally:
            for side in sides:
                side.shutdown()
