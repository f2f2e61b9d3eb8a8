"""Peers that live and move nothing: the rule by hand. Over real connections it is in
test_transport.py."""

from runtime.clock import ManualClock
from transfer.ucx.silence import SilentPeers


class Watched:
    """The rule with a limit of one second, asked every tenth."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.peers: SilentPeers[str] = SilentPeers(self.clock, limit_s=1.0)

    def after(self, tenths: int, busy: set[str], moved: frozenset[str] = frozenset()) -> list[str]:
        """Return the result of the last of this many polls."""
        found: list[str] = []
        for _ in range(tenths):
            self.clock.advance(0.1)
            found = self.peers.over_limit(busy, moved)
        return found


def test_a_peer_that_moves_nothing_is_over_the_limit_and_only_that() -> None:
    watched = Watched()
    assert watched.after(9, {"a", "b"}) == []
    watched.after(1, {"a", "b"}, frozenset({"b"}))
    assert watched.after(3, {"a", "b"}) == ["a"]
    assert sorted(watched.after(9, {"a", "b"})) == ["a", "b"]


def test_a_peer_with_nothing_under_way_may_be_silent_for_ever() -> None:
    watched = Watched()
    watched.after(9, {"a"})
    assert watched.after(100, set()) == []
    assert watched.after(9, {"a"}) == []
    assert watched.after(4, {"a"}) == ["a"]


def test_time_without_polling_counts_against_no_peer() -> None:
    watched = Watched()
    watched.after(5, {"a"})
    watched.clock.advance(60.0)
    assert watched.peers.over_limit({"a"}, set()) == []
    assert watched.after(6, {"a"}) == ["a"]
