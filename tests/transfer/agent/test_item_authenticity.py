"""Items of handoffs over real UCX: a stranger's, a recorded one and another session's are refused
and never written."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from engine.memory.layout import Buffer
from runtime.clock import SystemClock
from tests.support.transfer.handoff import Bytes, Pool, assert_handed_over, hybrid_specs, wait_until
from tests.support.transfer.stranger import Stranger, plausible_messages
from transfer.agent.agent import AgentLimits
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms, StageSessionState
from transfer.transport.authenticator import new_key
from transfer.transport.protocol import Operation, Peer, host_bytes
from transfer.transport.refusals import RefusalReason
from transfer.ucx.settings import TransportProfile
from transfer.ucx.transport import UcxTransport

COMPLETE, FAILED, DRAINED = (
    StageSessionState.COMPLETE,
    StageSessionState.FAILED,
    StageSessionState.DRAINED,
)
SOURCE_PAGES, DEST_PAGES, NUM_TOKENS = (3, 4, 9), (5, 6, 2), 11


class Recorder(UcxTransport):
    """A transport that keeps a copy of all it sends, as a network would that was listened to."""

    def __init__(self) -> None:
        super().__init__(profile=TransportProfile.TCP, clock=SystemClock())
        self.recorded: list[tuple[int, bytes]] = []

    def send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        self.recorded.append((tag, bytes(host_bytes(buffer))))
        return super().send(peer, tag, buffer)


@dataclass
class Rig:
    source: Pool
    dest: Pool
    sender: Recorder
    receiver: UcxTransport
    stranger: Stranger

    def open(
        self, session_id: str, *, epoch: int = 0, nonce: int = 7
    ) -> tuple[SourceTerms, DestinationTerms]:
        terms = self.source.terms(SOURCE_PAGES, NUM_TOKENS)
        destination = self.dest.destination(
            terms, DEST_PAGES, session_id=session_id, epoch=epoch, nonce=nonce
        )
        self.dest.open_receive(terms, destination)
        return terms, destination

    def hand_over(
        self, terms: SourceTerms, destination: DestinationTerms
    ) -> list[tuple[int, bytes]]:
        """Hand over a request; return all messages sent for it."""
        self.sender.recorded.clear()
        self.source.send(terms, destination)
        self.dest.wait(destination.session_id, COMPLETE, epoch=destination.epoch)
        self.source.wait(destination.session_id, COMPLETE, epoch=destination.epoch)
        return list(self.sender.recorded)

    def close(self, session_id: str) -> None:
        for pool in (self.dest, self.source):
            pool.close(session_id)
            pool.wait(session_id, DRAINED)

    def forge(self, messages: list[tuple[int, bytes]]) -> None:
        for tag, data in messages:
            self.stranger.send(self.receiver.address, tag, data)

    def until(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self.stranger.progress()
            return condition()

        wait_until(holds)

    def landed(self) -> dict[object, Bytes]:
        return {key: array.copy() for key, array in self.dest.stages[0].memory.arrays.items()}


@pytest.fixture
def rig() -> Iterator[Rig]:
    specs, limits = hybrid_specs(4), AgentLimits(drain_s=1)
    sender, receiver = Recorder(), UcxTransport(profile=TransportProfile.TCP, clock=SystemClock())
    source, dest = (
        Pool("prefill", [sender], specs, limits=limits),
        Pool("decode", [receiver], specs, limits=limits),
    )
    source.stages[0].memory.randomize(1)
    with Stranger() as stranger:
        yield Rig(source, dest, sender, receiver, stranger)
    source.shutdown()
    dest.shutdown()


def test_a_strangers_items_are_refused_and_the_handoff_continues(rig: Rig) -> None:
    terms, destination = rig.open("s")
    messages = plausible_messages(3)
    forged = [(tag, data) for tag, data in (next(messages) for _ in range(200)) if data]
    rig.forge(forged)
    rig.hand_over(terms, destination)
    rig.until(lambda: rig.receiver.refused == {RefusalReason.FOREIGN: len(forged)})
    assert_handed_over(rig.source, rig.dest, SOURCE_PAGES, DEST_PAGES)


def test_recorded_items_that_come_again_land_nowhere(rig: Rig) -> None:
    """In any order, while their session is open and when it is over."""
    recorded = rig.hand_over(*rig.open("s"))
    for array in rig.dest.stages[0].memory.arrays.values():
        array[:] = 0xEE  # as if the pages were another request's by now
    before = rig.landed()
    rig.forge(list(reversed(recorded)))
    rig.until(lambda: rig.receiver.refused == {RefusalReason.REPEATED: len(recorded)})
    rig.close("s")
    rig.forge(recorded)
    rig.until(lambda: rig.receiver.refused.get(RefusalReason.LATE) == len(recorded))
    assert all(np.array_equal(before[key], array) for key, array in rig.landed().items())


def test_items_of_an_earlier_epoch_do_not_land_in_the_next(rig: Rig) -> None:
    recorded = rig.hand_over(*rig.open("s"))
    terms, destination = rig.open("s", epoch=1)
    rig.forge(recorded)
    rig.until(lambda: rig.receiver.refused.get(RefusalReason.LATE) == len(recorded))
    rig.source.stages[0].memory.randomize(2)
    rig.hand_over(terms, destination)
    assert_handed_over(rig.source, rig.dest, SOURCE_PAGES, DEST_PAGES)


@pytest.mark.parametrize("at", [0, -1], ids=["item", "trailer"])
@pytest.mark.parametrize("same_key", [True, False], ids=["same key", "own key"])
def test_items_of_another_handoff_under_the_tags_of_this_one_fail_it(
    rig: Rig, at: int, *, same_key: bool
) -> None:
    """As by a process that reads the network: with all the tags and recordings, but not the key."""
    terms, destination = rig.open("other")
    foreign = rig.hand_over(terms, destination)
    rig.close("other")
    rig.source.stages[0].memory.randomize(2)
    own = rig.dest.destination(terms, DEST_PAGES, session_id="s", nonce=8)
    own = replace(own, key=destination.key if same_key else new_key())
    rig.dest.open_receive(terms, own)
    shift = own.tag_base - destination.tag_base
    tag, data = foreign[at]
    rig.forge([(tag + shift, data)])
    rig.until(lambda: not rig.stranger.num_under_way)
    rig.source.send(terms, own)
    (event,) = rig.dest.wait("s", FAILED)
    assert event.error_reason == "DIGEST_MISMATCH"
    expected = (
        "the list of authenticators"
        if at
        else "the bytes that arrived are not the bytes that were sent"
    )
    assert expected in event.error_text
