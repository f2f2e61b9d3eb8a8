"""Frames between stages over real UCX: what is not the pool's is refused by name, counted, and
changes nothing."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from runtime.errors import IntegrityError, PeerLostError
from tests.support.network.ports import taken_port
from tests.support.pool.formings import forming_of
from tests.support.transfer.stranger import Stranger, plausible_messages
from transfer.transport.authenticator import new_key
from transfer.transport.binding import NetworkBinding, loopback_device
from transfer.transport.forming import HEAD_BYTES, Forming
from transfer.transport.refusals import RefusalReason
from transfer.ucx.settings import TransportProfile
from transfer.ucx.stage_channel import UcxStageChannel

ROOT = Path(__file__).resolve().parents[3]
MAX_BYTES = 1 << 20
TIMEOUT_S = 60.0


class Recorder(UcxStageChannel):
    """A channel that keeps a copy of all frames it sends, as an eavesdropper would."""

    def __init__(self, rank: int, profile: TransportProfile = TransportProfile.TCP) -> None:
        super().__init__(rank=rank, max_frame_bytes=MAX_BYTES, profile=profile)
        self.recorded: list[tuple[int, bytes]] = []
        self.holds_back = False

    def put(
        self, rank: int, tag: int, frame: bytearray, *, deadline_s: float, timeout_s: float
    ) -> None:
        self.recorded.append((tag, bytes(frame)))
        if not self.holds_back:
            super().put(rank, tag, frame, deadline_s=deadline_s, timeout_s=timeout_s)


@pytest.fixture(params=[TransportProfile.TCP, TransportProfile.SHM], ids=str)
def stages(request: pytest.FixtureRequest) -> Iterator[list[Recorder]]:
    """Connect three stages of a pool in its first formation, each of which has received a greeting
    of the others."""
    stages = [Recorder(rank, request.param) for rank in range(3)]
    form(stages, forming_of(1, 3))
    yield stages
    for stage in stages:
        stage.close()


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    with Stranger() as stranger:
        yield stranger


def form(stages: list[Recorder], forming: Forming) -> None:
    for stage in stages:
        stage.connect([stage.address for stage in stages], forming)
    for sender, receiver in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)):
        assert passed(stages, sender, receiver, b"hello") == b"hello"
    for stage in stages:
        stage.recorded.clear()


def send(stage: UcxStageChannel, rank: int, text: bytes) -> None:
    stage.send(rank, bytearray(HEAD_BYTES) + text, timeout_s=TIMEOUT_S)


def received(stage: UcxStageChannel, rank: int, others: list[Recorder]) -> bytes | None:
    """Return the next message while the other stages progress; raise what `receive` raises."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        for other in others:
            if other is not stage:
                other.receive(stage._rank, timeout_s=0.0)
        frame = stage.receive(rank, timeout_s=0.01)
        if frame is not None:
            return bytes(frame)
    return None


def passed(stages: list[Recorder], sender: int, receiver: int, text: bytes) -> bytes | None:
    """Return the result of a frame sent now."""
    send(stages[sender], receiver, text)
    waiting = [stage for stage in stages if stage is stages[sender]]
    return received(stages[receiver], sender, waiting)


def until(
    condition: Callable[[], bool], stage: UcxStageChannel, rank: int, stranger: Stranger
) -> None:
    """Poll the stage for frames, none of which exist, until the condition holds."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, stage.refused
        stranger.progress()
        assert stage.receive(rank, timeout_s=0.01) is None


def test_a_strangers_frames_are_refused_and_force_no_forming(
    stages: list[Recorder], stranger: Stranger
) -> None:
    messages = plausible_messages(1)
    for number in range(300):
        stranger.send(stages[1].address, *next(messages))
        if number % 100 == 0:
            assert passed(stages, 0, 1, b"%d" % number) == b"%d" % number
    until(lambda: stages[1].refused == {RefusalReason.FOREIGN: 300}, stages[1], 0, stranger)
    assert passed(stages, 0, 1, b"after") == b"after"
    for rank in (0, 2):
        stages[1].check(rank)  # raises for a stage that counts as lost


def test_a_flood_keeps_no_stage_from_its_frames(stages: list[Recorder]) -> None:
    """While a process of its own sends as fast as it can."""
    command = [
        sys.executable,
        "-m",
        "tests.support.transfer.stranger",
        "2",
        stages[1].address.hex(),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as flood:
        number = 0
        while flood.poll() is None:
            assert passed(stages, 0, 1, b"%d" % number) == b"%d" % number
            number += 1
        assert flood.stdout is not None
        assert int(flood.stdout.read()) > 100
    assert number > 10
    assert set(stages[1].refused) == {RefusalReason.FOREIGN}
    stages[1].check(0)


def test_recorded_frames_that_come_again_are_refused_in_any_order(
    stages: list[Recorder], stranger: Stranger
) -> None:
    for number in range(4):
        assert passed(stages, 0, 1, b"%d" % number) == b"%d" % number
    for tag, frame in (*stages[0].recorded, *reversed(stages[0].recorded)):
        stranger.send(stages[1].address, tag, frame)
    until(lambda: stages[1].refused == {RefusalReason.REPLAYED: 8}, stages[1], 0, stranger)
    assert passed(stages, 0, 1, b"4") == b"4"


def test_a_frame_that_comes_before_its_turn_loses_the_stage(
    stages: list[Recorder], stranger: Stranger
) -> None:
    stages[0].holds_back = True
    for text in (b"first", b"second"):
        send(stages[0], 1, text)
    tag, second = stages[0].recorded[1]
    stranger.send(stages[1].address, tag, second)
    with pytest.raises(
        IntegrityError,
        match=r"from stage 0: what arrived is not what was sent .others before it are",
    ):
        until(lambda: False, stages[1], 0, stranger)
    assert stages[1].refused == {RefusalReason.SKIPPED: 1}
    with pytest.raises(PeerLostError, match="frames of stage 0 are missing"):
        stages[1].check(0)


def test_a_damaged_frame_loses_the_stage_and_is_named(
    stages: list[Recorder], stranger: Stranger
) -> None:
    stages[0].holds_back = True
    send(stages[0], 1, b"text")
    ((tag, frame),) = stages[0].recorded
    stranger.send(stages[1].address, tag, frame[:-1] + b"T")
    with pytest.raises(
        IntegrityError, match=r"from stage 0: what arrived is not what was sent .authenticator"
    ):
        until(lambda: False, stages[1], 0, stranger)
    assert stages[1].refused == {RefusalReason.DAMAGED: 1}
    with pytest.raises(PeerLostError, match="stage 0 sent a damaged frame"):
        stages[1].check(0)


def test_frames_of_an_earlier_forming_are_refused_by_name(
    stages: list[Recorder], stranger: Stranger
) -> None:
    assert passed(stages, 0, 1, b"old") == b"old"
    recorded = list(stages[0].recorded)
    form(stages, forming_of(2, 3, key=new_key()))
    for tag, frame in recorded:
        stranger.send(stages[1].address, tag, frame)
    until(lambda: stages[1].refused == {RefusalReason.EARLIER: 1}, stages[1], 0, stranger)
    assert passed(stages, 0, 1, b"new") == b"new"


def test_frames_for_another_member_are_refused_by_name(
    stages: list[Recorder], stranger: Stranger
) -> None:
    """Also those that come back to the stage that sent them."""
    assert passed(stages, 0, 1, b"for 1") == b"for 1"
    for receiver in (0, 2):
        stranger.send(stages[receiver].address, *stages[0].recorded[0])
        until(
            lambda receiver=receiver: stages[receiver].refused == {RefusalReason.CROSSED: 1},  # type: ignore[misc]
            stages[receiver],
            1,
            stranger,
        )
    assert passed(stages, 0, 2, b"for 2") == b"for 2"


def test_nothing_that_came_before_the_forming_is_ever_taken(stranger: Stranger) -> None:
    """Though it is what the sender's first frame will be, to the bit: forming 1 has a key that is
    known here."""
    sender, receiver = Recorder(0), Recorder(1)
    with closing(sender), closing(receiver):
        addresses, forming = [sender.address, receiver.address], forming_of(1, 2)
        sender.connect(addresses, forming)
        sender.holds_back = True
        send(sender, 1, b"early")
        for _ in range(3):
            stranger.send(receiver.address, *sender.recorded[0])
        deadline_s = time.monotonic() + TIMEOUT_S
        while receiver.refused != {RefusalReason.FOREIGN: 3}:
            assert time.monotonic() < deadline_s, receiver.refused
            stranger.progress()
            with suppress(PeerLostError):
                receiver.check(0)  # looks at what has come; there is no stage 0 yet
        receiver.connect(addresses, forming)
        assert receiver.receive(0, timeout_s=0.1) is None
        assert receiver.refused == {RefusalReason.FOREIGN: 3}


SHORT_LIVED = """
import sys
from transfer.transport.binding import NetworkBinding
from transfer.ucx.settings import TransportProfile
from transfer.ucx.stage_channel import UcxStageChannel
binding = NetworkBinding.parse(sys.argv[1], sys.argv[2])
stage = UcxStageChannel(rank=1, max_frame_bytes=1 << 20, profile=TransportProfile.TCP, binding=binding)
print(stage.address.hex())
"""


def test_a_stage_that_gets_the_port_of_another_pools_refuses_its_leader() -> None:
    """Pool A's stage is gone and B's has its port, as where manifests pin ports: A's leader
    connects and sends."""
    with taken_port("127.0.0.1") as taken:
        binding = NetworkBinding((loopback_device(),), (taken + 1, taken + 1))
        command = [sys.executable, "-c", SHORT_LIVED, loopback_device(), f"{taken + 1}-{taken + 1}"]
        gone = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
        leader_a, leader_b = Recorder(0), Recorder(0)
        stage_b = UcxStageChannel(
            rank=1, max_frame_bytes=MAX_BYTES, profile=TransportProfile.TCP, binding=binding
        )
    with closing(leader_a), closing(leader_b), closing(stage_b):
        # The same epoch and ranks, and even the same session: only key and members differ.
        stage_b.connect(
            [leader_b.address, stage_b.address],
            forming_of(1, 2, pool="b", session=1, key=new_key()),
        )
        leader_a.connect(
            [leader_a.address, bytes.fromhex(gone.stdout)],
            forming_of(1, 2, pool="a", session=1, key=new_key()),
        )
        send(leader_a, 1, b"batch 1 of pool A")
        deadline_s = time.monotonic() + TIMEOUT_S
        while not stage_b.refused:
            assert time.monotonic() < deadline_s, (
                "what A sent has not come: its address leads elsewhere"
            )
            leader_a.receive(1, timeout_s=0.01)
            assert stage_b.receive(0, timeout_s=0.01) is None
        assert stage_b.refused == {RefusalReason.FOREIGN: 1}
        stage_b.check(0)
