"""The tree against a model of it that knows every prompt by its tokens and looks at everything each
time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.prefix.eviction import HALF_LIFE_S, HIT_WEIGHT
from pool.prefix.resume_rule import ResumeRule
from pool.prefix.tree import Changed, Found, PrefixTree
from runtime.clock import ManualClock
from runtime.digests import NAME_BYTES
from runtime.errors import InternalError

Prompt = tuple[int, ...]
RULES = [
    ResumeRule(1),
    ResumeRule(2),
    ResumeRule(1, has_states=True),
    ResumeRule(1, grid_tokens=2, has_states=True),
]
PROMPTS = st.lists(st.integers(0, 1), max_size=6).map(tuple)  # one number per block


def name_of(blocks: Prompt) -> bytes:
    return bytes(blocks).ljust(NAME_BYTES, b"-")


def names(blocks: Prompt) -> tuple[bytes, ...]:
    return tuple(name_of(blocks[:end]) for end in range(1, len(blocks) + 1))


@dataclass
class Block:
    page: int
    used_s: float
    slot: int | None = None
    hits: int = 0
    saved: int = 1  # by the snapshot

    def worth(self, *, of_snapshot: bool) -> float:
        """Return a value that halves with each half-life, on a logarithmic scale."""
        return self.used_s + HALF_LIFE_S * log2(
            (1 + HIT_WEIGHT * self.hits) * (self.saved if of_snapshot else 1)
        )


@dataclass
class Naive:
    """Blocks by all tokens up to their end."""

    rule: ResumeRule
    now_s: float = 0.0
    blocks: dict[Prompt, Block] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)

    def known(self, prompt: Prompt) -> int:
        return max(
            depth
            for depth in range(len(prompt) + 1)
            if all(prompt[:end] in self.blocks for end in range(1, depth + 1))
        )

    def find(self, prompt: Prompt, num_tokens: int) -> Found:
        size, grid = self.rule.block_tokens, self.rule.grid_tokens
        points = [
            depth
            for depth in range(len(prompt) + 1)
            if depth * size < num_tokens and depth * size % grid == 0
        ]
        usable = [
            depth
            for depth in points
            if depth == 0
            or (
                prompt[:depth] in self.blocks
                and (not self.rule.has_states or self.blocks[prompt[:depth]].slot is not None)
            )
        ]
        depth, known = usable[-1], self.known(prompt)
        ends = (
            {points[-1], max(point for point in points if point <= known)}
            if self.rule.has_states
            else set()
        )
        return Found(
            depth * size,
            tuple(self.blocks[prompt[:end]].page for end in range(1, depth + 1)),
            self.blocks[prompt[:depth]].slot if depth else None,
            tuple(sorted(end * size for end in ends if end > depth)),
        )

    def resumed(self, prompt: Prompt) -> None:
        if prompt:
            self.blocks[prompt].hits += 1
            self.blocks[prompt].used_s = self.now_s

    def insert(
        self, prompt: Prompt, pages: Sequence[int], slot: int | None
    ) -> tuple[list[int], list[int]]:
        taken = list(pages[self.known(prompt) :])
        for end, page in enumerate(pages, 1):
            self.blocks.setdefault(prompt[:end], Block(page, self.now_s))
        if not prompt:
            return [], []
        end_block = self.blocks[prompt]
        end_block.used_s = self.now_s
        if slot is None or end_block.slot is not None:
            return taken, []
        end_block.slot = slot
        end_block.saved = len(prompt) - max(
            end
            for end in range(len(prompt))
            if end == 0 or (self.blocks[prompt[:end]].slot is not None)
        )
        return taken, [slot]

    def is_leaf(self, prompt: Prompt) -> bool:
        return not any(
            len(other) > len(prompt) and other[: len(prompt)] == prompt for other in self.blocks
        )

    def is_held(self, prompt: Prompt) -> bool:
        return self.blocks[prompt].page in self.held or self.blocks[prompt].slot in self.held

    def evict(self, num: int, *, slots: bool) -> tuple[list[int], list[int]]:
        """Return (pages, slots) evicted."""
        gone_pages, gone_slots = list[int](), list[int]()
        while sum(item not in self.held for item in (gone_slots if slots else gone_pages)) < num:
            candidates = [
                p
                for p, b in self.blocks.items()
                if (b.slot is not None if slots else self.is_leaf(p))
            ]
            if not candidates:
                break
            chosen = min(
                candidates, key=lambda p: (self.is_held(p), self.blocks[p].worth(of_snapshot=slots))
            )
            self.give_up(chosen, gone_pages, gone_slots)
        return gone_pages, gone_slots

    def give_up(self, prompt: Prompt, gone_pages: list[int], gone_slots: list[int]) -> None:
        slot, self.blocks[prompt].slot = self.blocks[prompt].slot, None
        gone_slots += [] if slot is None else [slot]
        while prompt and self.is_leaf(prompt) and self.blocks[prompt].slot is None:
            gone = self.blocks.pop(prompt)
            gone_pages.append(gone.page)
            prompt = prompt[:-1]
            if prompt:
                self.blocks[prompt].used_s = max(self.blocks[prompt].used_s, gone.used_s)
            if not self.rule.has_states:
                break


@pytest.mark.parametrize("rule", RULES, ids=str)
@given(data=st.data())
def test_it_matches_the_naive_model(rule: ResumeRule, data: st.DataObject) -> None:
    clock, ids, naive = ManualClock(), count(1), Naive(rule)
    tree = PrefixTree(
        rule,
        clock,
        is_page_held=lambda page: page in naive.held,
        is_slot_held=lambda slot: slot in naive.held,
    )
    for _ in range(data.draw(st.integers(1, 24))):
        clock.advance(data.draw(st.sampled_from([0.5, 7.0, 200.0])))
        naive.now_s = clock.now()
        prompt = data.draw(PROMPTS)
        num_tokens = len(prompt) * rule.block_tokens + data.draw(st.integers(1, rule.block_tokens))
        found = tree.find(names(prompt), num_tokens)
        assert found == naive.find(prompt, num_tokens)
        match data.draw(
            st.sampled_from(
                ["insert", "insert", "resume", "hold", "evict pages", "evict snapshots"]
            )
        ):
            case "insert":
                depth = len(prompt) - (len(prompt) * rule.block_tokens % rule.grid_tokens)
                pages, slot = (
                    [next(ids) for _ in range(depth)],
                    next(ids) if rule.has_states and depth else None,
                )
                taken = tree.insert(names(prompt[:depth]), pages, slot)
                assert (taken.page_ids, taken.slot_ids) == naive.insert(prompt[:depth], pages, slot)
            case "resume":
                tree.resumed(names(prompt), found.num_tokens)
                naive.resumed(prompt[: found.num_tokens // rule.block_tokens])
            case "hold":
                naive.held = {*found.page_ids, found.slot_id or 0}
            case "evict pages":
                compare(
                    tree.evict_pages(num := data.draw(st.integers(1, 4))),
                    naive.evict(num, slots=False),
                )
            case "evict snapshots":
                compare(
                    tree.evict_snapshots(num := data.draw(st.integers(1, 3))),
                    naive.evict(num, slots=True),
                )
        assert tree.num_pages == len(naive.blocks)
        assert points_of(tree) == {
            name_of(prompt)
            for prompt, block in naive.blocks.items()
            if block.slot is not None or not rule.has_states
        }
    given_up = tree.clear()
    assert sorted(given_up.page_ids) == sorted(block.page for block in naive.blocks.values())
    assert tree.num_pages == 0
    assert points_of(tree) == set()


def points_of(tree: PrefixTree) -> set[bytes]:
    with tree.journal.watch() as watcher:
        stored = b"".join(report.stored for report in watcher.take())
    return {stored[start : start + NAME_BYTES] for start in range(0, len(stored), NAME_BYTES)}


def compare(given_up: Changed, expected: tuple[list[int], list[int]]) -> None:
    assert (given_up.page_ids, given_up.slot_ids) == expected


def test_inserted_pages_have_a_state_exactly_at_split_points() -> None:
    tree = PrefixTree(ResumeRule(16, grid_tokens=64, has_states=True), ManualClock())
    with pytest.raises(InternalError, match="4 pages without a state"):
        tree.insert(names((1, 2, 3, 4)), [1, 2, 3, 4])
    with pytest.raises(InternalError, match="3 pages, where no prompt is split"):
        tree.insert(names((1, 2, 3)), [1, 2, 3], 1)
    with pytest.raises(InternalError, match="3 pages with a state"):
        PrefixTree(ResumeRule(16), ManualClock()).insert(names((1, 2, 3)), [1, 2, 3], 1)


def test_a_repeated_prompt_resumes_from_its_last_resume_point() -> None:
    """129 tokens: 128 can be reused, the last one draws. 128 tokens: only 64 of a grid of 64."""
    tree = PrefixTree(ResumeRule(16, grid_tokens=64, has_states=True), ManualClock())
    blocks = names(tuple(range(8)))
    assert tree.find(blocks, 129) == Found(snapshot_tokens=(128,))
    assert tree.find(blocks, 128) == Found(snapshot_tokens=(64,))
    tree.insert(blocks, range(1, 9), 5)
    assert tree.find(blocks, 129) == Found(128, (1, 2, 3, 4, 5, 6, 7, 8), 5)


def test_the_second_prompt_leaves_a_state_at_the_branch_for_the_third() -> None:
    tree = PrefixTree(ResumeRule(16, has_states=True), ManualClock())
    tree.insert(names((1, 2, 3, 4)), [1, 2, 3, 4], 1)
    assert tree.find(names((1, 2, 8, 9)), 65) == Found(snapshot_tokens=(32, 64))
    tree.insert(names((1, 2)), [5, 6], 2)
    assert tree.find(names((1, 2, 7)), 49) == Found(32, (1, 2), 2, snapshot_tokens=(48,))


@pytest.mark.parametrize(("block", "grid"), [(16, 16), (16, 64), (64, 16), (16, 24), (1, 1)])
def test_points_are_the_depths_that_are_points(block: int, grid: int) -> None:
    rule = ResumeRule(block, grid)
    for first in range(1, 9):
        depths = range(first, 20)
        assert list(rule.points(depths)) == [depth for depth in depths if rule.is_point(depth)]


def test_a_page_is_as_idle_as_the_last_prompt_through_it() -> None:
    clock = ManualClock(100.0)
    tree = PrefixTree(ResumeRule(16), clock)
    assert tree.idle_pages() == []
    tree.insert(names((1, 2, 3, 4)), [1, 2, 3, 4])
    clock.advance(50.0)
    tree.insert(names((1, 2, 5)), [1, 2, 6])
    clock.advance(5.0)
    assert sorted(tree.idle_pages()) == [(5.0, 1), (5.0, 2), (55.0, 2)]
    tree.resumed(names((1, 2, 3, 4)), 64)
    assert sorted(tree.idle_pages()) == [(0.0, 2), (0.0, 2), (5.0, 1)]
