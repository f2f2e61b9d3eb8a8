"""Token buckets of clients: charged on arrival, settled at the end."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.request.client_limits import ClientLimits, NamedLimits
from router.request.quotas import WINDOW_S, ClientQuotas, QuotaCharge, QuotaHold
from router.request.service_times import MAX_CLIENTS
from runtime.clock import ManualClock
from runtime.errors import CapacityError
from runtime.observe.metrics.router import ClientMetrics


class Router:
    """Quotas of one client at a router whose clock is set by hand."""

    def __init__(self, **limits: int) -> None:
        self.clock = ManualClock(1000.0)
        self.registry = CollectorRegistry()
        self.quotas = ClientQuotas(self.clock, ClientMetrics.create(self.registry))
        self.named = NamedLimits("alice", ClientLimits(**limits))

    def reserve(self, prompt: float = 0, generated: float = 0, client: str = "a") -> QuotaHold:
        return self.quotas.reserve(client, self.named, QuotaCharge(1, prompt, generated))

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(
            f"baton_client_{name}_total", {"client": "alice", **labels}
        )


def test_requests_beyond_the_quota_are_refused_until_it_refills() -> None:
    router = Router(requests_per_minute=2)
    router.reserve()
    router.reserve()
    with pytest.raises(CapacityError, match="quota of 2 requests a minute is used up") as refused:
        router.reserve()
    assert refused.value.resource == "requests_per_minute"
    assert refused.value.retry_after_s == WINDOW_S / 2
    router.reserve(client="b")
    router.clock.advance(WINDOW_S / 2)
    router.reserve()
    assert router.sample("refused", quota="requests_per_minute") == 1
    assert router.sample("requests") == 4


def test_a_refused_request_is_charged_to_no_quota() -> None:
    router = Router(requests_per_minute=10, prompt_tokens_per_minute=100)
    router.reserve(prompt=60)
    for _ in range(20):
        with pytest.raises(CapacityError):
            router.reserve(prompt=60)
    router.reserve(prompt=40)


def test_a_charge_is_settled_once_by_what_was_computed() -> None:
    """Cached tokens are given back; tokens beyond the expected ones are a debt."""
    router = Router(prompt_tokens_per_minute=100, generated_tokens_per_minute=100)
    hold = router.reserve(prompt=90, generated=10)
    hold.settle(QuotaCharge(1, prompt_tokens=10, generated_tokens=160), waited_s=2.0)
    hold.settle(QuotaCharge(1))
    assert router.sample("tokens", kind="prompt") == 10
    assert router.sample("tokens", kind="generated") == 160
    assert router.sample("wait_seconds") == 2.0
    with pytest.raises(CapacityError) as refused:
        router.reserve(prompt=90, generated=10)
    assert refused.value.resource == "generated_tokens_per_minute"
    assert refused.value.retry_after_s == pytest.approx(0.7 * WINDOW_S)
    router.clock.advance(0.7 * WINDOW_S + 1e-6)
    router.reserve(prompt=90, generated=10)


def test_a_prompt_above_the_quota_takes_a_whole_full_one() -> None:
    router = Router(prompt_tokens_per_minute=100)
    router.reserve(prompt=250)
    with pytest.raises(CapacityError) as refused:
        router.reserve(prompt=1)
    assert refused.value.retry_after_s == pytest.approx(1.51 * WINDOW_S)


def test_requests_at_the_same_time_are_limited() -> None:
    router = Router(concurrent_requests=2)
    first = router.reserve()
    router.reserve()
    with pytest.raises(CapacityError, match="2 requests of this client run, the limit is 2"):
        router.reserve()
    first.settle(QuotaCharge())
    router.reserve()


def test_idle_clients_are_forgotten_before_running_ones() -> None:
    router = Router(concurrent_requests=1)
    router.reserve(client="running")
    for number in range(2 * MAX_CLIENTS):
        router.reserve(client=str(number)).settle(QuotaCharge())
    assert len(router.quotas._accounts) == MAX_CLIENTS
    with pytest.raises(CapacityError):
        router.reserve(client="running")


# Pause before a request in seconds, its tokens as expected and as generated, and the number of
# requests that end after it.
REQUESTS = st.lists(
    st.tuples(st.floats(0, 5), st.integers(0, 300), st.integers(0, 300), st.integers(0, 3)),
    max_size=60,
)
QUOTA = 600


def most_used(router: Router, since_s: float, requests: list[tuple[float, int, int, int]]) -> float:
    """Return what a quota since `since_s` allows: its refills, and one request beyond them."""
    refilled = QUOTA * (1 + (router.clock.now() - since_s) / WINDOW_S)
    return refilled + max((max(each[1:3]) for each in requests), default=0)


@given(REQUESTS)
def test_one_after_another_uses_no_more_than_the_quota(
    requests: list[tuple[float, int, int, int]],
) -> None:
    """Whatever is expected of each."""
    router = Router(generated_tokens_per_minute=QUOTA)
    since_s, used = router.clock.now(), 0
    for pause_s, expected, generated, _ in requests:
        router.clock.advance(pause_s)
        with contextlib.suppress(CapacityError):
            router.reserve(generated=expected).settle(QuotaCharge(1, 0, generated))
            used += generated
        assert used <= most_used(router, since_s, requests)


@given(REQUESTS)
def test_at_the_same_time_they_use_no_more_than_the_quota(
    requests: list[tuple[float, int, int, int]],
) -> None:
    """If no more is generated than is expected, however many run at once."""
    router = Router(generated_tokens_per_minute=QUOTA)
    since_s, used = router.clock.now(), 0
    running: list[tuple[QuotaHold, int]] = []
    for pause_s, expected, generated, num_ending in requests:
        router.clock.advance(pause_s)
        with contextlib.suppress(CapacityError):
            running.append((router.reserve(generated=expected), min(generated, expected)))
        for _ in range(min(num_ending, len(running))):
            hold, tokens = running.pop(0)
            hold.settle(QuotaCharge(1, 0, tokens))
            used += tokens
        held = sum(tokens for _, tokens in running)
        assert used + held <= most_used(router, since_s, requests)
