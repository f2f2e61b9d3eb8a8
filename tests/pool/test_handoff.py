"""Where a handoff stands, from the reports of each stage; and who frees memory when."""

import asyncio
from collections.abc import Callable

import pytest

from pool import janitor as janitor_module
from pool.handoff import HandoffProgress
from pool.janitor import Janitor
from runtime.errors import HandoffError, IntegrityError, PeerLostError
from transfer.terms import StageSessionEvent, StageSessionState

OPEN, COMPLETE, FAILED, DRAINED = StageSessionState


def event(state: StageSessionState, *, epoch: int = 0, reason: str = "", num_bytes: int = 0) -> StageSessionEvent:
    return StageSessionEvent("s", epoch, state, reason, "layer 3 kv page 7" if reason else "", num_bytes)


def test_all_stages_must_report() -> None:
    progress = HandoffProgress(size=2, epoch=0)
    progress.on_report(0, event(OPEN))
    assert not progress.opened
    progress.on_report(0, event(OPEN))
    assert not progress.opened, "the same stage twice is one stage"
    progress.on_report(1, event(OPEN))
    assert progress.opened
    progress.on_report(0, event(COMPLETE, num_bytes=5))
    progress.on_report(1, event(COMPLETE, num_bytes=7))
    assert progress.complete
    assert progress.num_bytes == 12
    assert not progress.drained


def test_reports_of_another_epoch_change_nothing() -> None:
    progress = HandoffProgress(size=1, epoch=1)
    for state in (OPEN, COMPLETE, FAILED, DRAINED):
        progress.on_report(0, event(state, epoch=0, reason="HANDOFF_FAILED"))
    assert not (progress.opened or progress.complete or progress.drained)
    assert progress.error is None


@pytest.mark.parametrize(("reason", "kind"), [
    (IntegrityError.reason, IntegrityError), (PeerLostError.reason, PeerLostError), ("SOMETHING", HandoffError)])
def test_the_first_failure_is_kept_with_its_stage(reason: str, kind: type[Exception]) -> None:
    progress = HandoffProgress(size=2, epoch=0)
    progress.on_report(1, event(FAILED, reason=reason))
    progress.on_report(0, event(FAILED, reason="LATER"))
    assert type(progress.error) is kind
    assert str(progress.error) == "stage 1: layer 3 kv page 7"


class FakeGroup:
    """Remembers who listens."""

    def __init__(self) -> None:
        self.listener: Callable[[int, StageSessionEvent], None] | None = None
        self.forgotten: list[str] = []

    def listen(self, session_id: str, listener: Callable[[int, StageSessionEvent], None]) -> None:
        self.listener = listener

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)


class FakeLoop:
    """Runs commands at once."""

    def post(self, command: Callable[[], object]) -> None:
        command()


def make_janitor() -> tuple[Janitor, FakeGroup, list[str]]:
    group, told = FakeGroup(), []
    return Janitor(group, FakeLoop(), told.append), group, told  # type: ignore[arg-type]


async def test_memory_is_released_only_when_every_stage_has_drained() -> None:
    janitor, group, told = make_janitor()
    done: list[str] = []
    progress = HandoffProgress(size=2, epoch=0)
    janitor.end(lambda: done.append("released"), close=lambda: done.append("closed"), session_id="s",
                progress=progress)
    assert done == ["closed"]
    assert group.listener is not None
    group.listener(0, event(DRAINED))
    await asyncio.sleep(0)
    assert done == ["closed"]
    group.listener(1, event(DRAINED))
    await asyncio.sleep(0.01)
    assert done == ["closed", "released"]
    assert group.forgotten == ["s"]
    assert told == []
    assert janitor.open_tasks == 0


async def test_without_a_session_memory_is_released_at_once() -> None:
    janitor, _, _ = make_janitor()
    done: list[str] = []
    janitor.end(lambda: done.append("released"))
    assert done == ["released"]


async def test_a_session_that_does_not_drain_keeps_its_memory_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor_module, "DRAIN_TIMEOUT_S", 0.01)
    janitor, _, told = make_janitor()
    done: list[str] = []
    janitor.end(lambda: done.append("released"), session_id="s", progress=HandoffProgress(size=1, epoch=0))
    await asyncio.sleep(0.1)
    assert done == []
    assert "did not drain" in told[0]
