"""The leader's part of a tier: what it leases, and what becomes of it when things go wrong."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import pytest
from prometheus_client import CollectorRegistry

from engine.core.request import Request, SamplingParams
from engine.memory.integrity import check_integrity
from engine.memory.leases import PageAllocator, SlotAllocator
from pool.prefix.block_reads import MAX_READS
from pool.prefix.cache import PrefixCache
from pool.prefix.resume_rule import ResumeRule
from pool.tiers.block_store import Content, Tier
from pool.tiers.block_tier import BlockTier
from pool.tiers.stage_blocks import BlockMove
from runtime.clock import SystemClock
from runtime.errors import UnavailableError
from runtime.observe.metrics.caches import TierMetrics

T = TypeVar("T")
P = ParamSpec("P")
PAGE = 4


def names(text: str) -> tuple[bytes, ...]:
    """Return a prompt's names: one for each letter, chained."""
    return tuple(text[: end + 1].encode() for end in range(len(text)))


def request(blocks: tuple[bytes, ...], *, num_prompt_logprobs: int | None = None) -> Request:
    prompt = tuple(range(len(blocks) * PAGE + 1))
    params = SamplingParams(temperature=0)
    return Request("r", prompt, 4, params, num_prompt_logprobs=num_prompt_logprobs)


class DirectLoop:
    """Runs commands at once."""

    def post(self, command: Callable[[], object]) -> None:
        command()

    async def submit(self, call: Callable[[], T], *, undo: Callable[[T], object]) -> T:
        return call()


class DirectExecutor(Executor):
    """Runs work at once."""

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        done = Future[T]()
        done.set_result(call(*args, **kwargs))
        return done


class BusyExecutor(Executor):
    """Does not come to any work."""

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        return Future[T]()


@dataclass
class KnownBlocks:
    """The disk of a stage, which knows some blocks.

    What is to precede a write is no work for the thread that reads, which may be busy.
    """

    known: set[bytes]
    used: list[bytes] = field(default_factory=list)
    forgotten: list[tuple[bytes, Content]] = field(default_factory=list)
    num_bytes: int = 0

    async def find(self, asked: Sequence[bytes], *, with_state: bool) -> int:
        assert not with_state
        count = 0
        while count < len(asked) and asked[count] in self.known:
            count += 1
        return count

    @property
    def store(self) -> "KnownBlocks":
        return self

    @property
    def writing(self) -> "DirectExecutor":
        return DirectExecutor()

    @property
    def reading(self) -> "BusyExecutor":
        return BusyExecutor()

    async def run(self, executor: Executor, call: Callable[[], T]) -> T:
        return call()

    def forget(self, name: bytes, content: Content) -> None:
        self.forgotten.append((name, content))

    def use(self, names: Sequence[bytes]) -> None:
        self.used += names


@dataclass
class Stages:
    """The stages of a pool: they move blocks when they may, as many as they can."""

    may_move: asyncio.Event = field(default_factory=asyncio.Event)
    moves: list[BlockMove] = field(default_factory=list)
    most: int = 1000
    error: UnavailableError | None = None

    async def move(self, move: BlockMove) -> int:
        self.moves.append(move)
        await self.may_move.wait()
        if self.error is not None:
            raise self.error
        return min(self.most, len(move.names))


class Scene:
    """A disk cache over 40 pages, and the disk that knows the blocks of one prompt."""

    def __init__(self, on_disk: str, *, num_pages: int = 41) -> None:
        self.pages, self.slots = PageAllocator(num_pages), SlotAllocator(0)
        self.cache = PrefixCache(ResumeRule(PAGE), self.pages, self.slots, SystemClock())
        self.stages = Stages()
        self.known = KnownBlocks(set(names(on_disk)))
        self.disk = BlockTier(
            Tier.DISK,
            self.cache,
            self.known,  # type: ignore[arg-type]
            DirectLoop(),  # type: ignore[arg-type]
            self.stages.move,
            self.known.find,
            TierMetrics.create(CollectorRegistry()),
        )

    def bring(self, text: str) -> asyncio.Task[int]:
        return asyncio.create_task(self.disk.bring(request(names(text)), names(text)))

    def insert(self, text: str) -> None:
        """Compute a prompt, and cache all of its blocks."""
        found = self.cache.find(names(text), len(text) * PAGE + 1).page_ids
        with self.pages.alloc(len(text) - len(found), owner="a request", shared=found) as lease:
            self.cache.insert(names(text), lease.page_ids)

    def num_cached(self, text: str) -> int:
        return len(self.cache.find(names(text), len(text) * PAGE + 1).page_ids)

    def check_ended(self) -> None:
        """Nothing is leased, and what is not cached is free."""
        check_integrity([self.pages.ledger], live_owners=())
        assert self.pages.num_available == self.pages.num_total

    def count(self, event: str) -> float:
        return float(self.disk.metrics.blocks.labels("disk", event)._value.get())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_blocks_are_leased_until_they_are_cached() -> None:
    scene = Scene("abcd")
    bringing = scene.bring("abcdxy")
    await until(lambda: scene.stages.moves)
    (move,) = scene.stages.moves
    assert (move.load, move.names) == (True, names("abcd"))
    assert scene.pages.num_available == scene.pages.num_total - 4
    assert scene.num_cached("abcd") == 0
    check_integrity([scene.pages.ledger], live_owners=scene.cache.holders)
    scene.stages.may_move.set()
    assert await bringing == 4
    assert scene.num_cached("abcdxy") == 4
    assert len(scene.stages.moves) == 1, "what comes from the disk is not written there again"
    scene.check_ended()
    assert await scene.bring("abcdxy") == 0
    assert len(scene.stages.moves) == 1, "and is not read again"


async def test_only_blocks_that_memory_lacks_are_read() -> None:
    scene = Scene("abcd")
    scene.stages.may_move.set()
    scene.stages.most = 2
    assert await scene.bring("abcd") == 2
    assert scene.num_cached("abcd") == 2
    scene.stages.most = 1000
    assert await scene.bring("abcd") == 4
    assert [move.names for move in scene.stages.moves] == [names("abcd"), names("abcd")[2:]]
    assert scene.num_cached("abcd") == 4
    assert (scene.count("read"), scene.count("missing")) == (4, 2)
    assert scene.known.forgotten == [(names("abc")[-1], Content.PAGE)], "a stage lacked the third"
    scene.check_ended()


async def test_prompts_that_begin_alike_share_one_read() -> None:
    scene = Scene("abcd")
    waiting = [scene.bring(text) for text in ("abcd", "abcdef", "abxy")]
    await until(lambda: scene.stages.moves)
    await asyncio.sleep(0.02)
    assert len(scene.stages.moves) == 1
    scene.stages.may_move.set()
    assert await asyncio.gather(*waiting) == [4, 4, 2], "each counts what it has of the read"
    assert len(scene.stages.moves) == 1
    scene.check_ended()


async def test_nothing_is_cached_after_a_loss_in_the_middle() -> None:
    """A stage that was replaced meanwhile comes with empty memory."""
    scene = Scene("abcd")
    bringing = scene.bring("abcd")
    await until(lambda: scene.stages.moves)
    scene.cache.clear()
    scene.stages.may_move.set()
    await bringing
    assert scene.num_cached("abcd") == 0
    scene.check_ended()


async def test_a_lost_stage_ends_the_read() -> None:
    scene = Scene("abcd")
    scene.stages.error = UnavailableError("stage 1 died")
    scene.stages.may_move.set()
    assert await scene.bring("abcd") == 0
    assert scene.num_cached("abcd") == 0
    scene.check_ended()


async def test_a_slow_disk_keeps_its_memory_but_not_the_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pool.tiers.block_tier.READ_LIMIT_S", 0.05)
    scene = Scene("abcd")
    await scene.bring("abcd")
    assert scene.pages.num_available == scene.pages.num_total - 4, "a stage may still write there"
    await scene.bring("xyz")  # no other one waits as long as the disk does not answer
    scene.stages.may_move.set()
    await until(lambda: scene.num_cached("abcd") == 4)
    scene.check_ended()


async def test_a_cancelled_request_leaves_the_read_to_others() -> None:
    scene = Scene("abcd")
    bringing = scene.bring("abcd")
    await until(lambda: scene.stages.moves)
    bringing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bringing
    scene.stages.may_move.set()
    await until(lambda: scene.num_cached("abcd") == 4)
    scene.check_ended()


async def test_without_room_nothing_is_read() -> None:
    scene = Scene("abcd", num_pages=8)
    with scene.pages.alloc(5, owner="a request"):
        await scene.bring("abcd")
    assert scene.stages.moves == []
    scene.check_ended()


async def test_reads_at_a_time_are_bounded() -> None:
    texts = "abcdefghijkl"
    scene = Scene("")
    scene.known.known.update(text.encode() for text in texts)
    waiting = [scene.bring(text) for text in texts]
    await until(lambda: len(scene.stages.moves) == MAX_READS)
    await asyncio.sleep(0.02)
    assert sum(task.done() for task in waiting) == len(texts) - MAX_READS
    scene.stages.may_move.set()
    await asyncio.gather(*waiting)
    scene.check_ended()


async def test_prompts_whose_tokens_are_all_scored_are_computed() -> None:
    scene = Scene("abcd")
    await scene.disk.bring(request(names("abcd"), num_prompt_logprobs=1), names("abcd"))
    assert scene.stages.moves == []


async def test_blocks_are_not_read_if_computing_them_is_faster() -> None:
    scene = Scene("abcdefgh")
    scene.stages.may_move.set()
    scene.stages.most = 1
    await scene.bring("abcdefgh")  # the first read shows how long a block takes
    reads = scene.disk.reads
    assert reads.cost == 0, "the time to compute a block is not known"
    reads.likely_s = lambda num_tokens: 1e-12
    for _ in range(15):
        await scene.bring("abcdefgh")
    assert len(scene.stages.moves) == 1
    assert scene.count("slower") == 15 * 7
    assert reads.cost > 1
    assert reads.computing_s(14) == pytest.approx(2e-12)
    await scene.bring("abcdefgh")
    assert len(scene.stages.moves) == 2, "from time to time it is tried again"


async def test_the_time_that_reads_wait_for_each_other_is_not_that_of_a_block() -> None:
    """One thread reads: of eight reads at once the last takes eight times as long as it would alone."""
    texts = [letter * 4 for letter in "abcdefgh"]
    scene = Scene("")
    scene.known.known.update(name for text in texts for name in names(text))
    reads = scene.disk.reads
    reads.likely_s = lambda num_tokens: 10.0
    began_s = time.monotonic()
    waiting = [scene.bring(text) for text in texts]
    await until(lambda: len(scene.stages.moves) == MAX_READS)
    await asyncio.sleep(0.08)
    scene.stages.may_move.set()
    await asyncio.gather(*waiting)
    seconds = time.monotonic() - began_s
    assert reads.cost * reads.computing_s(1) < seconds / 8, "a read of four alone is a quarter"
    scene.check_ended()


async def test_a_prompt_does_not_wait_for_others_longer_than_it_computes() -> None:
    scene = Scene("abcdefgh")
    scene.known.known.update(names("xyz"))
    reads = scene.disk.reads
    reads.likely_s = lambda num_tokens: num_tokens * 1e-3
    reads._block_s = PAGE * 0.5e-3  # half as long as to compute it
    bringing = scene.bring("abcdefgh")
    await until(lambda: scene.stages.moves)
    assert await scene.bring("xyz") == 0
    assert scene.count("slower") == 3
    scene.stages.may_move.set()
    assert await bringing == 8
    assert await scene.bring("xyz") == 3
    scene.check_ended()


async def test_new_blocks_are_written_and_stay_until_then() -> None:
    scene = Scene("")
    with scene.pages.alloc(3, owner="a request") as lease:
        scene.cache.insert(names("abc"), lease.page_ids)
        page_ids = tuple(lease.page_ids)
    await until(lambda: scene.stages.moves)
    (move,) = scene.stages.moves
    assert (move.load, move.names, move.page_ids) == (False, names("abc"), page_ids)
    scene.cache.clear()
    assert scene.pages.num_free == scene.pages.num_total - 3, "a stage still reads them"
    scene.stages.may_move.set()
    await until(lambda: scene.pages.num_free == scene.pages.num_total)
    await scene.disk.finish(1)
    assert scene.count("written") == 3
    scene.check_ended()


async def test_a_prompt_longer_than_the_share_of_writes_is_written() -> None:
    """Of 40 pages five; the next blocks follow as they are written."""
    scene = Scene("")
    text = "abcdefghijklm"
    scene.insert(text)
    await until(lambda: scene.stages.moves)
    assert [move.names for move in scene.stages.moves] == [names(text)[:5]]
    assert scene.pages.num_free == scene.pages.num_total - 13
    scene.cache.clear()
    assert scene.pages.num_free == scene.pages.num_total - 5, "what waits holds no memory"
    scene.stages.may_move.set()
    await scene.disk.finish(1)
    assert (scene.count("written"), scene.count("skipped")) == (5, 8)
    scene.insert(text)
    await scene.disk.finish(1)
    assert [move.names for move in scene.stages.moves[1:]] == [
        names(text)[:5],
        names(text)[5:10],
        names(text)[10:],
    ]
    assert (scene.count("written"), scene.count("skipped")) == (18, 8)
    scene.check_ended()


async def test_no_more_waits_than_the_cache_holds() -> None:
    """The third prompt evicts what writes do not hold of the first, and two blocks of the second."""
    scene = Scene("", num_pages=17)
    for text in ("abcdefgh", "ijklmnop", "qrstuvwx"):
        scene.insert(text)
    await until(lambda: scene.stages.moves)
    assert scene.count("skipped") == 6, "the rest of the first prompt"
    scene.stages.may_move.set()
    await scene.disk.finish(1)
    written = [name for move in scene.stages.moves for name in move.names]
    assert written == [*names("abcdefgh")[:2], *names("ijklmnop")[:6], *names("qrstuvwx")]
    assert scene.count("skipped") == 8
    scene.check_ended()


async def test_a_prompt_that_shares_blocks_writes_its_own_only() -> None:
    scene = Scene("")
    scene.stages.may_move.set()
    scene.insert("abc")
    scene.insert("abcde")
    await scene.disk.finish(1)
    assert [move.names for move in scene.stages.moves] == [names("abc"), names("abcde")[3:]]
    scene.check_ended()


async def test_waiting_ends_though_a_stage_does_not_answer() -> None:
    scene = Scene("")
    scene.insert("abc")
    await scene.disk.finish(0.05)
    scene.stages.may_move.set()
    await scene.disk.finish(1)
    scene.check_ended()


async def test_blocks_in_use_in_memory_are_not_the_first_to_go_on_disk() -> None:
    scene = Scene("abcd")
    scene.stages.may_move.set()
    for text in ("abcd", "abcdxy", "abcdz"):
        await scene.bring(text)
    assert scene.known.used == list(names("abcd"))


async def test_a_slow_read_that_fails_does_not_end_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pool.tiers.block_tier.READ_LIMIT_S", 0.05)
    scene = Scene("abcd")
    await scene.bring("abcd")
    scene.stages.error = UnavailableError("stage 1 died")
    scene.stages.may_move.set()
    await until(lambda: scene.pages.num_available == scene.pages.num_total)
    await asyncio.sleep(0.01)
    scene.stages.error = None
    await scene.bring("abcd")
    assert scene.num_cached("abcd") == 4
    scene.check_ended()
