"""A request that waits before it is queued, while its pool loses a stage or forms again."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.request import Request, SamplingParams
from pool.request.handler import RequestHandler, RequestParts, serve
from pool.tiers.block_store import Tier
from protos import types_pb2
from runtime.errors import UnavailableError
from runtime.grammar import Grammar, GrammarKind

REQUEST = Request(
    "r",
    (1, 2, 3),
    max_tokens=1,
    sampling=SamplingParams(),
    grammar=Grammar(GrammarKind.REGEX, b"a"),
    adapter="a@1",
)


class Pool:
    """A pool for which a request waits three times. Fakes leader, grammars, adapters and caches."""

    def __init__(self) -> None:
        self.serving, self.reason = True, ""
        self.has_adapter = True
        self.num_queued = 0
        self.on_wait: dict[str, Callable[[Pool], None]] = {}
        self.tier = Tier.DISK
        self.cache = SimpleNamespace(num_resumable=lambda blocks: 0)
        self.geometry = SimpleNamespace(page_size=16)

    def lose_a_stage(self) -> None:
        self.serving, self.reason = False, "stage 1 of the pool died"

    def form_without_the_adapter(self) -> None:
        self.has_adapter = False

    def _wait(self, name: str) -> None:
        if name in self.on_wait:
            self.on_wait[name](self)

    async def check(self, grammar: Grammar) -> None:
        self._wait("grammar")

    @asynccontextmanager
    async def leased(self, key: str) -> AsyncIterator[None]:
        self._wait("adapter")
        yield

    def check_loaded(self, key: str) -> None:
        if not self.has_adapter:
            raise UnavailableError("formed again without the adapter")

    async def bring(self, *args: object) -> int:
        self._wait("blocks")
        return 0

    async def serve(self) -> None:
        own: Any = self
        others: dict[str, Any] = dict.fromkeys(("reclaimer", "meters", "post", "switch", "ranks"))
        parts = RequestParts(
            leader=own,
            plan=own,
            adapters=own,
            tiers=((own,),),
            pullers=(own,),
            grammars=own,
            **others,
        )

        async def begin() -> RequestHandler:
            await parts.bring(REQUEST, (), types_pb2.BlockHolder())
            self.num_queued += 1
            return cast("RequestHandler", Handler())

        await serve(parts, REQUEST, begin)


class Handler:
    async def run(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize("wait", ["grammar", "adapter", "blocks"])
@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Pool.lose_a_stage, "the pool does not serve: stage 1 of the pool died"),
        (Pool.form_without_the_adapter, "formed again without the adapter"),
    ],
)
async def test_a_request_is_not_queued_on_stages_that_cannot_run_it(
    wait: str, event: Callable[[Pool], None], message: str
) -> None:
    pool = Pool()
    await pool.serve()
    assert pool.num_queued == 1
    pool.on_wait[wait] = event
    with pytest.raises(UnavailableError, match=message):
        await pool.serve()
    assert pool.num_queued == 1
