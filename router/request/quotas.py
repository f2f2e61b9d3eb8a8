"""Quotas of clients: token buckets that are charged on arrival and settled at the end.

hold = quotas.reserve(client, named, QuotaCharge(1, prompt_tokens=900, generated_tokens=200))
...                                                 # CapacityError: a quota is used up
hold.settle(QuotaCharge(1, prompt_tokens=100, generated_tokens=350))

On arrival a request is charged its whole prompt and the tokens that it is expected to generate; at
the end, the prompt tokens that were computed and the tokens that were generated. A bucket may
thereby fall below zero, and later requests wait for it. Each router counts for itself.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Self

from prometheus_client import Counter

from router.request.client_limits import NamedLimits
from router.request.service_times import MAX_CLIENTS
from runtime.clock import Clock
from runtime.errors import CapacityError
from runtime.observe.metrics.router import ClientMetrics

WINDOW_S = 60.0  # a bucket holds the quota of a minute


@dataclass(frozen=True)
class QuotaCharge:
    """Amounts of one request; those of all its choices together."""

    requests: float = 1.0
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0


_KINDS = {kind: f"{kind}_per_minute" for kind in ("requests", "prompt_tokens", "generated_tokens")}


@dataclass
class TokenBucket:
    """An amount that refills steadily up to `capacity` within `WINDOW_S`."""

    capacity: float
    level: float
    at_s: float

    def refill(self, capacity: float, now_s: float) -> None:
        """Bring the level up to now; `capacity` may have changed."""
        gained = (now_s - self.at_s) * self.capacity / WINDOW_S
        self.capacity = capacity
        self.level = min(capacity, self.level + gained)
        self.at_s = now_s

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` may be taken: 0 if it may now.

        A larger amount than the capacity may be taken from a full bucket.
        """
        missing = min(amount, self.capacity) - self.level
        return max(0.0, missing * WINDOW_S / self.capacity)


@dataclass
class _Account:
    """Buckets of one client by kind, and its running requests."""

    buckets: dict[str, TokenBucket] = field(default_factory=dict)
    num_running: int = 0

    def bucket(self, kind: str, capacity: float, now_s: float) -> TokenBucket:
        bucket = self.buckets.get(kind)
        if bucket is None:
            bucket = self.buckets[kind] = TokenBucket(capacity, capacity, now_s)
        bucket.refill(capacity, now_s)
        return bucket


@dataclass(frozen=True)
class _Counters:
    """The counters of one name: looking a label up takes longer than all sums of a request."""

    requests: Counter
    prompt_tokens: Counter
    generated_tokens: Counter
    wait_s: Counter

    @classmethod
    def of(cls, metrics: ClientMetrics, name: str) -> Self:
        return cls(
            metrics.requests.labels(name),
            metrics.tokens.labels(name, "prompt"),
            metrics.tokens.labels(name, "generated"),
            metrics.wait_s.labels(name),
        )


class QuotaHold:
    """The charge of a running request, until it is settled."""

    def __init__(self, account: _Account, counters: _Counters, charged: QuotaCharge) -> None:
        self._account = account
        self._counters = counters
        self._charged: QuotaCharge | None = charged

    def settle(self, actual: QuotaCharge, *, waited_s: float = 0.0) -> None:
        """Replace the charge by the actual one. Idempotent: the first call counts.

        `waited_s` is the time that the request was queued.
        """
        charged = self._charged
        self._charged = None
        if charged is None:
            return
        self._account.num_running -= 1
        for kind, bucket in self._account.buckets.items():
            bucket.level += getattr(charged, kind) - getattr(actual, kind)
        self._counters.wait_s.inc(waited_s)
        self._counters.prompt_tokens.inc(actual.prompt_tokens)
        self._counters.generated_tokens.inc(actual.generated_tokens)


class ClientQuotas:
    """The accounts of all clients. Clients that are idle longest are forgotten first."""

    def __init__(self, clock: Clock, metrics: ClientMetrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._counters: dict[str, _Counters] = {}  # by name, as many as tables were read
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def reserve(self, client: str, named: NamedLimits, charge: QuotaCharge) -> QuotaHold:
        """Charge a request that arrives.

        Raises:
            CapacityError: a quota of the client is used up, or too many of its requests run; names
                it, and nothing is charged.
        """
        account = self._account(client)
        limits = named.limits
        if limits.concurrent_requests and account.num_running >= limits.concurrent_requests:
            raise self._refused(
                named,
                "concurrent_requests",
                f"{account.num_running} requests of this client run, the limit is "
                f"{limits.concurrent_requests}",
                None,
            )
        buckets = []
        for kind, setting in _KINDS.items():
            quota = getattr(limits, setting)
            if not quota:
                if kind in account.buckets:
                    del account.buckets[kind]
                continue
            bucket, amount = account.bucket(kind, quota, self._clock.now()), getattr(charge, kind)
            if wait_s := bucket.wait_s(amount):
                raise self._refused(
                    named,
                    setting,
                    f"this client's quota of {quota} {kind.replace('_', ' ')} a minute is used up",
                    wait_s,
                )
            buckets.append((bucket, amount))
        for bucket, amount in buckets:
            bucket.level -= amount
        account.num_running += 1
        counters = self._counters.get(named.name)
        if counters is None:
            counters = self._counters[named.name] = _Counters.of(self._metrics, named.name)
        counters.requests.inc()
        return QuotaHold(account, counters, charge)

    def _account(self, client: str) -> _Account:
        account = self._accounts.setdefault(client, _Account())
        self._accounts.move_to_end(client)
        if len(self._accounts) > MAX_CLIENTS:
            idle = next((key for key, each in self._accounts.items() if not each.num_running), None)
            if idle is not None and idle != client:
                del self._accounts[idle]
        return account

    def _refused(
        self, named: NamedLimits, quota: str, message: str, wait_s: float | None
    ) -> CapacityError:
        self._metrics.refused.labels(named.name, quota).inc()
        return CapacityError(message, resource=quota, retry_after_s=wait_s)
