"""Prompts on their way into the scheduler of a simulated prefill worker."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine.core.request import Request
from pool.request.entry import Failed
from pool.request.handler import Brought
from prefill.prompts import PrefillEmitter, PrefillEntryEvent, PromptMemory, Started
from prefill.scheduler import PrefillScheduler
from protos import decode_pb2, types_pb2
from runtime.errors import BatonError
from sim.block_sources import BlockSources
from sim.surroundings import Surroundings


@dataclass(eq=False)
class QueuedPrompt:
    """A prompt for which blocks are brought, and which is queued afterwards.

    `key` is that of the scheduler, 0 before it is queued.
    """

    key: int = 0
    brought: Brought = field(default_factory=Brought)
    bringing: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Do not queue it if that has not happened. Idempotent."""
        if self.bringing is not None:
            self.bringing.cancel()


@dataclass(eq=False)
class PromptIntake:
    """The prompts of one incarnation of a worker, until they are in its scheduler.

    Attributes:
        check_serving: raises a `BatonError` if the worker takes no prompts.
        launch: is called after a change of the scheduler.
        started: is called when a prompt begins that will be decoded here, too.
    """

    around: Surroundings
    scheduler: PrefillScheduler
    sources: BlockSources
    check_serving: Callable[[], None]
    launch: Callable[[], None]
    started: Callable[[], None]
    _own: set[int] = field(default_factory=set)  # prompts that will be decoded here, too
    _bringing: set[QueuedPrompt] = field(default_factory=set)

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts that no other object of the worker counts."""
        return len(self._own) + len(self._bringing)

    def enter(
        self,
        prompt: QueuedPrompt,
        message: types_pb2.EngineRequest,
        holder: str,
        emit: PrefillEmitter,
        was_queued: Callable[[], object],
    ) -> None:
        """Queue a prompt, after bringing blocks for it if there is a source.

        Raises:
            BatonError: it is rejected at once; later, `emit` gets the error.
        """
        self.check_serving()
        request, blocks = self._request_of(message), self._blocks_of(message)

        def submit() -> None:
            prompt.key = self.scheduler.submit(request, emit, blocks=blocks)
            was_queued()
            self.launch()

        async def bring() -> None:
            try:
                prompt.brought = await self.sources.bring(request, blocks, holder)
                self.check_serving()
                submit()
            except BatonError as error:
                emit(Failed(error))

        if self.sources.may_bring(holder):
            self._bringing.add(prompt)
            prompt.bringing = asyncio.create_task(bring())
            prompt.bringing.add_done_callback(lambda _: self._bringing.discard(prompt))
        else:
            submit()

    def read(
        self,
        message: types_pb2.EngineRequest,
        holder: str,
        emit: PrefillEmitter,
        queued: Callable[[decode_pb2.DecodeLocal], object],
    ) -> QueuedPrompt:
        """Queue a prompt that will be decoded here, too, as `enter`.

        `queued` is called when it is queued.

        Raises:
            BatonError: as `enter`.
        """

        def was_queued() -> None:
            self._own.add(prompt.key)
            cache = self.scheduler.cache
            num_cached = cache.find(blocks, len(message.prompt_token_ids)).num_tokens
            counts = prompt.brought.counts(num_cached)
            queued(decode_pb2.DecodeLocal(cached_tokens=num_cached, **counts))

        prompt, blocks = QueuedPrompt(), self._blocks_of(message)
        self.enter(prompt, message, holder, partial(self._happened, emit), was_queued)
        return prompt

    def hand_over(self, prompt: QueuedPrompt) -> PromptMemory:
        """Return the memory of a computed prompt that was queued by `read`."""
        self._own.discard(prompt.key)
        return self.scheduler.hand_over(prompt.key)

    def give_up(self, prompt: QueuedPrompt) -> None:
        """Release a prompt that was queued by `read`. Idempotent."""
        prompt.cancel()
        if prompt.key in self._own:
            self._own.discard(prompt.key)
            self.scheduler.release(prompt.key)
            self.launch()

    def _happened(self, emit: PrefillEmitter, event: PrefillEntryEvent) -> None:
        if isinstance(event, Started):
            self.started()
        emit(event)

    def _request_of(self, message: types_pb2.EngineRequest) -> Request:
        return Request(
            message.request_id,
            range(len(message.prompt_token_ids)),
            message.max_tokens,
            priority=message.priority,
        )

    def _blocks_of(self, message: types_pb2.EngineRequest) -> tuple[bytes, ...]:
        """Return the request's block names; none after its client has gone."""
        prompt = self.around.prompts.get(message.request_id)
        page_size = self.around.costs.model.page_size
        return () if prompt is None else prompt.page_names(page_size)
