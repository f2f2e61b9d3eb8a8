"""Retry delays of requests that found the queue full."""

from router.request.demand import MAX_RETRY_S
from router.request.return_times import MAX_CLIENTS, OVERBOOKING, ReturnTimes
from runtime.clock import ManualClock


def test_requests_of_a_client_come_back_one_after_another() -> None:
    clock = ManualClock()
    returns = ReturnTimes(clock)
    delays = [returns.delay_s("a", 1.0, 1.0) for _ in range(4)]
    assert delays == [1.0, 1.0 + 1 / OVERBOOKING, 1.0 + 2 / OVERBOOKING, 1.0 + 3 / OVERBOOKING]
    assert returns.delay_s("b", 1.0, 1.0) == 1.0, "another client's do not delay it"
    clock.advance(60.0)
    assert returns.delay_s("a", 1.0, 1.0) == 1.0, "all of them are over"


def test_no_delay_is_longer_than_the_limit() -> None:
    returns = ReturnTimes(ManualClock())
    delays = [returns.delay_s("a", 1.0, 1.0) for _ in range(100)]
    assert max(delays) == MAX_RETRY_S
    assert returns.delay_s("a", MAX_RETRY_S, 1.0) == MAX_RETRY_S


def test_clients_whose_requests_are_due_are_forgotten() -> None:
    clock = ManualClock()
    returns = ReturnTimes(clock)
    for number in range(3 * MAX_CLIENTS):
        returns.delay_s(str(number), 1.0, 0.1)
        clock.advance(0.01)
    assert len(returns._latest_s) <= MAX_CLIENTS
