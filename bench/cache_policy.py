"""`python -m bench.cache_policy TRACE --capacity TOKENS`: hit rate of a prefix cache on a trace.

Replays the prompts of a trace against `pool.prefix.tree`, with its choice of snapshots and
evictions, and without a model: each prompt is computed instantly on arrival. TRACE is in Mooncake's
format: JSON lines with `timestamp` (ms), `input_length` (tokens) and `hash_ids` (one per block;
prompts are equal as long as their ids are), or a folder of agents' conversations
(`baton.agent_traces`), which begin at random times, `--rate` a second. Memory of `--capacity`
tokens is divided between pages and snapshots (`SNAPSHOT_SHARE`). `--state-tokens` is the size of a
snapshot in tokens, 0 for a model without recurrent states.

With `--sessions all` the prompts of every conversation name their session, with `odd` those of
every other one; with `--ends` the last one also says that it is the last.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.replays import begun
from baton.traces import read_trace as read_conversations
from baton.workload import Arrivals
from bench.arguments import above_zero, at_least
from bench.report import Value, render
from engine.core.request import CacheSession
from pool.prefix.resume_rule import ResumeRule
from pool.prefix.tree import SNAPSHOT_SHARE, Changed, PrefixTree
from router.request.cache_hints import RETENTION_S
from runtime.clock import ManualClock
from runtime.errors import ConfigError


@dataclass(frozen=True)
class TracedPrompt:
    """Prompt of a trace; `blocks` are the ids of its whole blocks."""

    at_s: float
    num_tokens: int
    blocks: tuple[bytes, ...]
    conversation: int = 0
    session: CacheSession | None = None


_KINDS = ("even", "odd")


def _block(number: int) -> bytes:
    return number.to_bytes(8, "little")


def read_agents(
    folder: Path, rate: float, sessions: str, retention_s: float, *, tell_ends: bool
) -> list[TracedPrompt]:
    """Return the prompts of recorded conversations, which begin at `rate` a second.

    `sessions` says which name their sessions: none, odd or all.

    Raises:
        ConfigError: the recordings cannot be read.
    """
    planned = begun(read_conversations(folder).planned, Arrivals(rate=rate), seed=1)
    last = {item.turn.session: item for item in planned if item.turn}
    prompts = []
    for item in planned:
        if item.turn is None:
            raise ConfigError(f"{folder} has requests of no conversation", field="trace")
        number = item.turn.session
        is_last = item is last[number]
        session = CacheSession(_block(number), b"", retention_s, ends=tell_ends and is_last)
        blocks = item.blocks[: item.prompt_tokens // item.block_tokens]
        names_session = sessions == "all" or (sessions == "odd" and number % 2 == 1)
        prompts.append(
            TracedPrompt(
                item.at_s,
                item.prompt_tokens,
                tuple(map(_block, blocks)),
                number,
                session if names_session else None,
            )
        )
    return prompts


def read_trace(path: Path, block_tokens: int) -> Iterator[TracedPrompt]:
    """Yield the prompts of a trace, or raise ConfigError naming the invalid line."""
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                yield _prompt(line, f"{path}:{number}", block_tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}", field="trace") from error


def _prompt(line: str, where: str, block_tokens: int) -> TracedPrompt:
    try:
        entry = json.loads(line)
        at_s = float(entry["timestamp"]) / 1000
        num_tokens = int(entry["input_length"])
        names = tuple(_block(int(item)) for item in entry["hash_ids"][: num_tokens // block_tokens])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{where}: needs timestamp, input_length and hash_ids ({error!r})", field="trace"
        ) from None
    if not 0 <= at_s < math.inf or num_tokens < 1:
        raise ConfigError(
            f"{where}: timestamp must be finite and not negative, input_length at least 1",
            field="trace",
        )
    return TracedPrompt(at_s, num_tokens, names)


class CachedPool:
    """Pages and snapshot slots of one pool; all belong to its cache, except during a prompt."""

    def __init__(self, rule: ResumeRule, num_pages: int, num_slots: int) -> None:
        self._clock = ManualClock()
        self._rule = rule
        self._leased: set[int] = set()
        self._kept: set[int] = set()
        self._tree = PrefixTree(
            rule,
            self._clock,
            is_page_held=self._leased.__contains__,
            num_pages=num_pages,
            num_slots=num_slots,
        )
        self.journal = self._tree.journal
        self._pages, self._slots = list(range(1, num_pages + 1)), list(range(1, num_slots + 1))

    def compute(self, prompt: TracedPrompt) -> int:
        """Compute a prompt; return the number of its tokens that were cached."""
        self._clock.advance(prompt.at_s - self._clock.now())
        found = self._tree.find(prompt.blocks, prompt.num_tokens)
        self._tree.resumed(prompt.blocks, found.num_tokens, prompt.session)
        self._leased.update(found.page_ids)
        pages = [*found.page_ids, *self._lease_pages(len(prompt.blocks) - len(found.page_ids))]
        for num_tokens in found.snapshot_tokens:
            self._insert(prompt, num_tokens // self._rule.block_tokens, pages, self._take_slot())
        if not self._rule.has_states:
            self._insert(prompt, len(prompt.blocks), pages, None)
        self._pages += self._leased - self._kept
        self._leased.clear()
        return found.num_tokens

    def _insert(
        self, prompt: TracedPrompt, count: int, pages: Sequence[int], slot: int | None
    ) -> None:
        taken = self._tree.insert(prompt.blocks[:count], pages, slot, prompt.session)
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


def replay(
    prompts: Iterable[TracedPrompt], capacity: int, state_tokens: int, block_tokens: int
) -> dict[str, Value]:
    """Return the figures of a trace; `token_hit` is the share of tokens cached on arrival.

    Raises:
        ConfigError: a snapshot or a prompt does not fit.
    """
    num_slots = capacity // SNAPSHOT_SHARE // state_tokens if state_tokens else 0
    if state_tokens and not num_slots:
        raise ConfigError(
            f"capacity must be at least {SNAPSHOT_SHARE * state_tokens} tokens for a snapshot of "
            f"{state_tokens}, got {capacity}",
            field="capacity",
        )
    num_pages = (capacity - num_slots * state_tokens) // block_tokens
    pool = CachedPool(
        ResumeRule(block_tokens, block_tokens, has_states=state_tokens > 0), num_pages, num_slots
    )
    num_prompts = 0
    num_tokens, num_hit = [0, 0], [0, 0]  # of even conversations, and of odd ones
    for prompt in prompts:
        if len(prompt.blocks) > num_pages:
            raise ConfigError(
                f"a prompt of {prompt.num_tokens} tokens does not fit into {num_pages} pages of "
                f"{block_tokens}: increase the capacity",
                field="capacity",
            )
        num_prompts += 1
        num_tokens[prompt.conversation % 2] += prompt.num_tokens
        num_hit[prompt.conversation % 2] += pool.compute(prompt)
    return {
        "prompts": num_prompts,
        "tokens": sum(num_tokens),
        "capacity": capacity,
        "state_tokens": state_tokens,
        "snapshot_slots": num_slots,
        "token_hit": sum(num_hit) / max(1, sum(num_tokens)),
        **(
            {
                f"token_hit_{kind}": num_hit[each] / num_tokens[each]
                for each, kind in enumerate(_KINDS)
            }
            if all(num_tokens)
            else {}
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument(
        "--capacity",
        type=at_least(1),
        required=True,
        help="cache size in tokens of pages",
    )
    parser.add_argument(
        "--state-tokens",
        type=at_least(0),
        default=3000,
        help="size of a recurrent state in tokens; 0: no states; default 3000",
    )
    parser.add_argument(
        "--block-tokens", type=at_least(1), default=512, help="tokens per hash id; default 512"
    )
    parser.add_argument(
        "--rate", type=above_zero, default=0.02, help="conversations a second; default 0.02"
    )
    parser.add_argument("--sessions", choices=("none", "odd", "all"), default="none")
    parser.add_argument("--ends", action="store_true")
    parser.add_argument("--retention", type=at_least(0), default=RETENTION_S, help="in seconds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    try:
        prompts = (
            read_agents(
                flags.trace,
                flags.rate,
                flags.sessions,
                flags.retention,
                tell_ends=flags.ends,
            )
            if flags.trace.is_dir()
            else read_trace(flags.trace, flags.block_tokens)
        )
        values = replay(prompts, flags.capacity, flags.state_tokens, flags.block_tokens)
    except ConfigError as error:
        print(f"bench.cache_policy: {error}", file=sys.stderr)
        return 1
    print(render("cache_policy", values, as_json=flags.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
