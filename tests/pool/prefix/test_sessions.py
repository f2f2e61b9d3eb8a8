"""Retention of sessions' resume points: hand-made histories, and random ones against what must hold."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.request import CacheSession
from pool.prefix.resume_rule import ResumeRule
from pool.prefix.sessions import MAX_POINTS, RETAINED_SHARE
from pool.prefix.tree import PrefixTree
from runtime.clock import ManualClock

NUM_PAGES = 40


def tag(
    name: str, retention_s: float = 300.0, *, client: str = "", ends: bool = False
) -> CacheSession:
    return CacheSession(name.encode(), client.encode(), retention_s, ends)


class Cached:
    """A tree in which block `x` of a prompt has a page of its own; prompts are strings."""

    def __init__(
        self, *, has_states: bool = False, num_pages: int = NUM_PAGES, num_slots: int = NUM_PAGES
    ) -> None:
        self.clock = ManualClock()
        self.tree = PrefixTree(
            ResumeRule(16, has_states=has_states),
            self.clock,
            num_pages=num_pages,
            num_slots=num_slots,
        )
        self.has_states = has_states
        self.page_of = dict[bytes, int]()
        self.slot_of = dict[bytes, int]()

    def names(self, prompt: str) -> list[bytes]:
        return [prompt[:end].encode() for end in range(1, len(prompt) + 1)]

    def prompt(self, prompt: str, session: CacheSession | None = None) -> int:
        """Resume and store a prompt, a second after the one before; return the blocks found."""
        self.clock.advance(1.0)
        names = self.names(prompt)
        found = self.tree.find(names, 16 * len(names) + 1)
        self.check(prompt, found.page_ids, found.slot_id)
        self.tree.resumed(names, found.num_tokens, session)
        pages = [self.page_of.setdefault(name, len(self.page_of) + 1) for name in names]
        slot = (
            self.slot_of.setdefault(names[-1], len(self.slot_of) + 1) if self.has_states else None
        )
        self.tree.insert(names, pages, slot, session)
        return len(found.page_ids)

    def check(self, prompt: str, page_ids: Iterable[int], slot_id: int | None) -> None:
        """Check that what was found is that of this prompt."""
        found = list(page_ids)
        names = self.names(prompt)[: len(found)]
        assert found == [self.page_of[name] for name in names]
        if self.has_states and names:
            assert slot_id == self.slot_of[names[-1]]

    def has(self, prompt: str) -> bool:
        return self.tree.num_in_place(self.names(prompt)) == len(prompt)

    def evict(self, num_pages: int) -> None:
        self.tree.evict_pages(num_pages)


def test_the_newest_point_outlives_later_prompts_of_no_session() -> None:
    cached = Cached()
    cached.prompt("abc", tag("s"))
    cached.prompt("xyz")
    cached.evict(3)
    assert cached.has("abc")
    assert not cached.has("x")


@pytest.mark.parametrize(("seconds", "stays"), [(299, True), (301, False)])
def test_retention_decays(seconds: int, *, stays: bool) -> None:
    """A point with 300 s of retention is worth as much as one that was used 300 s later."""
    cached = Cached()
    cached.prompt("abc", tag("s"))
    cached.clock.advance(seconds - 1)
    cached.prompt("xyz")
    cached.evict(3)
    assert cached.has("abc") is stays
    assert cached.has("xyz") is not stays


def test_a_branch_that_a_newer_turn_left_goes_before_older_prompts() -> None:
    """The second turn dropped the end of the first one's response."""
    cached = Cached()
    cached.prompt("old")
    cached.prompt("abcde", tag("s"))
    cached.prompt("abcdxy", tag("s"))
    cached.evict(1)
    assert not cached.has("abcde")
    assert cached.has("abcdxy")
    assert cached.has("old")


def test_a_sub_agents_branch_does_not_supersede_its_agents() -> None:
    """It shares the first block of six: both points are retained."""
    cached = Cached()
    cached.prompt("abcdef", tag("s"))
    cached.prompt("aABCDE", tag("s"))
    cached.prompt("xyz")
    cached.evict(3)
    assert cached.has("abcdef")
    assert cached.has("aABCDE")


def test_an_ended_session_is_evicted_first() -> None:
    cached = Cached()
    cached.prompt("old")
    cached.prompt("abc", tag("s"))
    cached.prompt("aXY", tag("s"))
    cached.prompt("abcd", tag("s", ends=True))
    cached.evict(3)
    assert cached.has("old")
    assert not cached.has("aX")
    assert len(cached.tree.retained.sessions) == 0
    assert cached.tree.retained.num_retained == 0


def test_a_point_that_is_used_again_is_not_demoted_any_more() -> None:
    cached = Cached()
    cached.prompt("abcde", tag("s"))
    cached.prompt("abcdxy", tag("s"))
    cached.prompt("abcde")
    cached.prompt("old")
    cached.evict(1)
    assert cached.has("abcde")
    assert not cached.has("old")


def test_a_shared_point_belongs_to_no_session() -> None:
    """Otherwise the next turn of one would demote the point that the other resumes from."""
    cached = Cached()
    cached.prompt("abc", tag("s"))
    cached.prompt("abc", tag("t"))
    cached.prompt("abcd", tag("s"))
    cached.prompt("abcX", tag("t"))
    assert len(cached.tree.retained.sessions) == 2
    cached.prompt("xyz")
    cached.evict(2)
    assert cached.has("abcd")
    assert cached.has("abcX")
    assert not cached.has("xy")


def test_two_sessions_may_store_one_prompt_at_the_same_time() -> None:
    """Neither resumes from the other's; the point then belongs to none, and goes with no session."""
    cached = Cached()
    cached.prompt("abc", tag("s"))
    cached.tree.insert(cached.names("abc"), [1, 2, 3], session=tag("t", ends=True))
    cached.prompt("xyz")
    cached.tree.insert(cached.names("abcd"), [1, 2, 3, 9], session=tag("s", ends=True))
    cached.evict(1)
    assert not cached.has("abcd")
    assert cached.has("abc")
    assert len(cached.tree.retained.sessions) == 0


def test_states_of_earlier_turns_go_before_those_of_others() -> None:
    cached = Cached(has_states=True)
    cached.prompt("old")
    cached.prompt("abc", tag("s"))
    cached.prompt("abcdef", tag("s"))
    cached.tree.evict_snapshots(1)
    assert cached.tree.slot_of(b"abc") is None
    assert cached.tree.slot_of(b"abcdef") is not None
    assert cached.tree.slot_of(b"old") is not None


def test_one_client_retains_no_more_than_its_share() -> None:
    """Of 40 pages 20 are retained at most: those of the client with the most lose it first."""
    cached = Cached()
    cached.prompt("modest", tag("m", client="m"))
    for number in range(8):
        cached.prompt(f"{number}greedy"[:4], tag(f"s{number}", client="g"))
    retained = cached.tree.retained
    assert retained.num_retained <= NUM_PAGES // RETAINED_SHARE
    cached.prompt("xyz")
    cached.evict(20)
    assert cached.has("modest")
    assert [cached.has(f"{number}gre") for number in range(8)] == [False] * 5 + [True] * 3


def test_sessions_retain_no_more_than_their_share_of_states() -> None:
    """Two of four slots, although their prompts are short."""
    cached = Cached(has_states=True, num_slots=4)
    for name in "abcd":
        cached.prompt(name, tag(name))
    cached.prompt("z")
    cached.tree.evict_snapshots(3)
    assert [cached.tree.slot_of(name.encode()) is not None for name in "abcdz"] == [
        False,
        False,
        True,
        True,
        False,
    ]


def test_points_per_session_are_bounded() -> None:
    cached = Cached(num_pages=1000)
    for number in range(2 * MAX_POINTS):
        cached.prompt(f"{chr(65 + number)}bc", tag("s"))
    assert cached.tree.retained.num_retained == 3 * MAX_POINTS


SESSIONS = st.one_of(
    st.none(),
    st.builds(
        tag,
        st.sampled_from("stu"),
        st.sampled_from([0.0, 10.0, 3600.0]),
        client=st.sampled_from("cd"),
        ends=st.booleans(),
    ),
)


@pytest.mark.parametrize("states", [0, 1])
@given(
    prompts=st.lists(
        st.tuples(st.text("ab", min_size=1, max_size=8), SESSIONS, st.integers(0, 6)), max_size=30
    )
)
def test_no_session_changes_what_a_prompt_finds(
    states: int, prompts: list[tuple[str, CacheSession | None, int]]
) -> None:
    """Random prompts, sessions and evictions: found pages are the prompt's own, and all go back."""
    cached = Cached(has_states=bool(states))
    for prompt, session, num_evicted in prompts:
        cached.prompt(prompt, session)
        if num_evicted > 3 and states:
            cached.tree.evict_snapshots(num_evicted - 3)
        elif num_evicted:
            cached.evict(num_evicted)
        retained = cached.tree.retained
        assert 0 <= retained.num_retained <= NUM_PAGES // RETAINED_SHARE
        assert len(retained.sessions) <= 3
    given_up = cached.tree.clear()
    assert len(given_up.page_ids) == len(set(given_up.page_ids))
    assert cached.tree.num_pages == 0
    assert len(cached.tree.retained.sessions) == 0
    assert cached.tree.retained.num_retained == 0
