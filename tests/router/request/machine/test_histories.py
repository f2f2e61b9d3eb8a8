"""Random histories: every request ends once, with nothing lost, repeated or left."""

import pytest

from protos import types_pb2
from runtime.errors import BatonError
from tests.router.request.machine.driver import NUM_TOKENS, History
from tests.router.request.machine.world import FIRST, LIMITS


def play(seed: int, num_faults: int) -> History:
    history = History(seed, num_faults)
    try:
        world = history.run()
        check(history)
    except AssertionError as error:
        raise AssertionError(f"seed {seed} after {history.events}: {error}") from error
    assert world.end is not None
    return history


def check(history: History) -> None:
    """Check what the client got."""
    world = history.world
    assert world.kinds.count("End") == 1
    num_tokens = len(world.tokens)
    assert world.tokens == list(range(FIRST, FIRST + num_tokens)), "lost, repeated or wrong tokens"
    assert num_tokens <= NUM_TOKENS
    end = world.end
    assert end is not None
    if end.finish is not None and end.finish.reason == types_pb2.FINISH_REASON_LENGTH:
        assert num_tokens == NUM_TOKENS or history.is_spoiled
    if end.error is not None:
        assert isinstance(end.error, BatonError)
    assert world.attempts <= LIMITS.prefill_attempts
    assert world.kinds.count("SearchPair") <= LIMITS.migrations + 12, "drained pools aside"


@pytest.mark.parametrize("num_faults", [0, 2, 12])
def test_random_histories_end_once_and_leave_nothing(num_faults: int) -> None:
    endings = [play(seed, num_faults) for seed in range(1000)]
    complete = [
        history
        for history in endings
        if history.world.end is not None
        and history.world.end.finish is not None
        and len(history.world.tokens) == NUM_TOKENS
    ]
    assert len(complete) > (1000 if num_faults == 0 else 100) - 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_thousand_histories_end_once_and_leave_nothing() -> None:
    for seed in range(100_000):
        play(1_000_000 + seed, seed % 16)
