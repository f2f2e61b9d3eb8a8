"""Pages of a draft: shared or cached ones are never written again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from decode.entry import DecodeEntryEvent, DecodeLimits
from decode.scheduler import DecodeScheduler
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo, TokenTree, Verified
from engine.core.request import Request, SampledToken, SamplingParams
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepResult
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.trees.draft_batches import extend_batch, followed_rows
from pool.prefix.resume_rule import ResumeRule
from runtime.clock import ManualClock
from runtime.digests import block_names, pairing_digest

DRAFTING = pairing_digest("model", "draft")
PAGE_SIZE, NODES = 4, 3
PROMPT = tuple(range(1, 12))
CHAIN = TokenTree((100,) * NODES, (-1, 0, 1))


@dataclass
class Pool:
    """A scheduler whose drafts are right or wrong at random, by `rng`."""

    rng: random.Random
    num_draft_tokens: int | None = NODES
    written: set[int] = field(default_factory=set)  # pages that the draft wrote in the last step

    def __post_init__(self) -> None:
        self.scheduler = DecodeScheduler(
            pages=PageAllocator(40),
            slots=SlotAllocator(0),
            clock=ManualClock(),
            cache_rule=ResumeRule(PAGE_SIZE),
            limits=DecodeLimits(
                page_size=PAGE_SIZE,
                grid=1,
                depth=1,
                max_running=4,
                max_context_tokens=64,
                num_draft_tokens=NODES,
                local_rest_tokens=8,
            ),
            draft_length=lambda num_running: self.num_draft_tokens,
        )

    def join(self, *, with_draft: bool = True) -> int:
        """Add a prompt that was handed over."""
        reservation = self.scheduler.reserve(
            self._request(), _ignored, blocks=self.blocks, compatibility=DRAFTING
        )
        self.scheduler.join(reservation.key, 100, with_draft=with_draft)
        return reservation.key

    def read(self) -> int:
        """Add a prompt whose rest is computed here."""
        return self.scheduler.read_rest(
            self._request(),
            _ignored,
            blocks=self.blocks,
            compatibility=DRAFTING,
        ).key

    @property
    def blocks(self) -> tuple[bytes, ...]:
        return block_names(PROMPT, PAGE_SIZE, compatibility=DRAFTING)

    def _request(self) -> Request:
        return Request("r", PROMPT, 30, SamplingParams(temperature=0))

    def step(self) -> ForwardBatch | None:
        """Run one step, followed by the draft's slots."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return None
        runs, verified = list[AcceptedRun](), list[Verified]()
        for row, (length, sampling) in enumerate(
            zip(batch.query_lens, batch.sampling, strict=True)
        ):
            if sampling is not None:
                count = self.rng.randint(1, length) if batch.mode is ForwardMode.VERIFY else 1
                runs.append(AcceptedRun(row, list(range(count)), [SampledToken(100)] * count))
                verified.append(Verified(tuple(range(count)), CHAIN))
        kept = set(self.scheduler.pages.ledger.kept_ids())
        self.written = set()
        if batch.mode is ForwardMode.PREBUILT:
            verified = [Verified((), CHAIN) for _ in batch.request_keys]
        elif followed := followed_rows(batch, runs):
            self.written = _written(extend_batch(batch, followed, PAGE_SIZE))
        assert not self.written & kept
        self.scheduler.on_result(
            batch, StepResult(0, [token for run in runs for token in run.tokens], verified=verified)
        )
        return batch


def _ignored(event: DecodeEntryEvent) -> None:
    pass


def _written(extend: ForwardBatch) -> set[int]:
    places = [
        (row, slot // PAGE_SIZE)
        for row, (context, count) in enumerate(
            zip(extend.context_lens, extend.query_lens, strict=True)
        )
        for slot in range(context, context + count)
    ]
    pages = {int(extend.page_tables[place]) for place in places}
    assert 0 not in pages, "the null page"
    return pages


def starts(batch: ForwardBatch | None) -> Sequence[int]:
    assert batch is not None
    assert isinstance(batch.spec_info, SpecInfo)
    return [row.draft_start for row in batch.spec_info.rows]


def test_a_restarted_draft_writes_no_page_of_its_prompt() -> None:
    pool = Pool(random.Random(0))
    pool.join()
    pool.step()
    assert starts(pool.step()) == [0]
    kept = set(pool.scheduler.pages.ledger.kept_ids())
    assert len(kept) == len(PROMPT) // PAGE_SIZE
    pool.num_draft_tokens = None
    pool.step()
    pool.num_draft_tokens = NODES
    assert starts(pool.step())[0] > len(PROMPT)
    assert pool.written


def test_a_draft_follows_a_cached_prompt_with_draft_state_from_its_start() -> None:
    pool = Pool(random.Random(0))
    pool.scheduler.release(pool.join())
    pool.read()
    assert starts(pool.step()) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_no_cached_page_is_ever_written(seed: int) -> None:
    rng = random.Random(seed)
    pool, keys = Pool(rng), list[int]()
    for _ in range(200):
        pool.num_draft_tokens = rng.choice([None, 0, 1, NODES, NODES])
        if len(keys) < 3 and rng.random() < 0.2:
            cached = len(pool.scheduler.cache.find(pool.blocks, len(PROMPT)).page_ids)
            keys.append(
                pool.read()
                if cached and rng.random() < 0.5
                else pool.join(with_draft=rng.random() < 0.8)
            )
        if keys and rng.random() < 0.05:
            pool.scheduler.release(keys.pop(rng.randrange(len(keys))))
        pool.step()
        keys = [key for key in keys if pool.scheduler.holds(key)]
