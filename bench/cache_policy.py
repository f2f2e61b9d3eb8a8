"""`python -m bench.cache_policy TRACE --capacity TOKENS`: which share of a trace's prompt tokens a prefix cache serves.

Replays the prompts of a trace against `pool.prefix.tree`, with its choice of snapshots and of what to give up, and
without a model: a prompt is computed the moment it comes. TRACE is in Mooncake's format: JSON lines with `timestamp`
(ms), `input_length` (tokens) and `hash_ids` (one per block; equal ids, equal prompts up to there). Memory of
`--capacity` tokens is divided between pages and snapshots (`SNAPSHOT_SHARE`); `--state-tokens` is what a snapshot
takes, in tokens, 0 for a model without recurrent states.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import Value, render
from pool.prefix.tree import SNAPSHOT_SHARE, Changed, PrefixTree, ResumeRule
from runtime.clock import ManualClock


@dataclass(frozen=True)
class TracedPrompt:
    """`blocks`: the names of its whole blocks."""

    at_s: float
    num_tokens: int
    blocks: tuple[bytes, ...]


def read_trace(path: Path, block_tokens: int) -> Iterator[TracedPrompt]:
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            whole = entry["hash_ids"][:entry["input_length"] // block_tokens]
            yield TracedPrompt(entry["timestamp"] / 1000, entry["input_length"],
                               tuple(item.to_bytes(8, "little") for item in whole))


class CachedPool:
    """Pages and snapshot slots of one pool, all of them its cache's but while a prompt is computed."""

    def __init__(self, rule: ResumeRule, num_pages: int, num_slots: int) -> None:
        self._clock = ManualClock()
        self._rule = rule
        self._leased: set[int] = set()
        self._kept: set[int] = set()
        self._tree = PrefixTree(rule, self._clock, is_page_held=self._leased.__contains__)
        self.journal = self._tree.journal
        self._pages, self._slots = list(range(1, num_pages + 1)), list(range(1, num_slots + 1))

    def compute(self, prompt: TracedPrompt) -> int:
        """Returns how many of its tokens were there."""
        self._clock.advance(prompt.at_s - self._clock.now())
        found = self._tree.find(prompt.blocks, prompt.num_tokens)
        self._tree.resumed(prompt.blocks, found.num_tokens)
        self._leased.update(found.page_ids)
        pages = [*found.page_ids, *self._lease_pages(len(prompt.blocks) - len(found.page_ids))]
        for num_tokens in found.snapshot_tokens:
            self._insert(prompt.blocks[:num_tokens // self._rule.block_tokens], pages, self._take_slot())
        if not self._rule.has_states:
            self._insert(prompt.blocks, pages, None)
        self._pages += self._leased - self._kept
        self._leased.clear()
        return found.num_tokens

    def _insert(self, blocks: Sequence[bytes], pages: Sequence[int], slot: int | None) -> None:
        taken = self._tree.insert(blocks, pages, slot)
        self._kept.update(taken.page_ids)
        if slot is not None and not taken.slot_ids:
            self._slots.append(slot)

    def _lease_pages(self, count: int) -> list[int]:
        if count > len(self._pages):
            self._reclaim(self._tree.evict_pages(count - len(self._pages)))
        granted = [self._pages.pop() for _ in range(count)]
        self._leased.update(granted)
        return granted

    def _take_slot(self) -> int:
        if not self._slots:
            self._reclaim(self._tree.evict_snapshots(1))
        return self._slots.pop()

    def _reclaim(self, given: Changed) -> None:
        self._kept -= set(given.page_ids)
        self._pages += set(given.page_ids) - self._leased
        self._slots += given.slot_ids


def replay(prompts: Iterable[TracedPrompt], capacity: int, state_tokens: int, block_tokens: int) -> dict[str, Value]:
    """`token_hit`: the share of all tokens that were there when their prompt came."""
    num_slots = capacity // SNAPSHOT_SHARE // state_tokens if state_tokens else 0
    pool = CachedPool(ResumeRule(block_tokens, block_tokens, has_states=state_tokens > 0),
                      (capacity - num_slots * state_tokens) // block_tokens, num_slots)
    num_prompts = num_tokens = num_hit = 0
    for prompt in prompts:
        num_prompts += 1
        num_tokens += prompt.num_tokens
        num_hit += pool.compute(prompt)
    return {"prompts": num_prompts, "tokens": num_tokens, "capacity": capacity, "state_tokens": state_tokens,
            "snapshot_slots": num_slots, "token_hit": num_hit / num_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", type=int, required=True, help="memory of the cache, in tokens of pages")
    parser.add_argument("--state-tokens", type=int, default=3000, help="default 3000; 0: no recurrent states")
    parser.add_argument("--block-tokens", type=int, default=512, help="tokens per hash id; default 512")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    prompts = read_trace(flags.trace, flags.block_tokens)
    print(render("cache_policy", replay(prompts, flags.capacity, flags.state_tokens, flags.block_tokens),
                 as_json=flags.json))


if __name__ == "__main__":
    main()
