"""Prometheus metrics: typed instruments per role. Names are stable; units are base units.

    rpc, pool = RpcMetrics.create(registry), PoolMetrics.create(registry)       # of runtime.observe.exposition

A role creates the instrument sets it moves and no others. Labels never hold anything a client
chose.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TPOT_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
E2E_S = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
STAGE_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    300,
)
TRANSFER_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    5,
)
STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
PICK_S = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ACCEPT_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 17)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

# Why a session or a try may fail: reasons of `runtime.errors` that workers meet. Their counters
# stand at 0 from the start: what appears with its first failure has no increase that an alert could
# see.
FAILURES = (
    "ABORTED_BY_CLIENT",
    "DEADLINE_EXCEEDED",
    "DIGEST_MISMATCH",
    "DRAINING",
    "HANDOFF_FAILED",
    "HELD_UP",
    "INCOMPATIBLE_PEER",
    "INTERNAL",
    "OUT_OF_CAPACITY",
    "PEER_LOST",
    "UNAVAILABLE",
)
SESSION_FAILURES = tuple(reason.lower() for reason in FAILURES)


# Reasons of `transfer.transport.refusals` by channel.
REFUSALS = {
    "frames": ("foreign", "earlier", "crossed", "replayed", "skipped", "damaged", "oversized"),
    "handoff": ("foreign", "late", "repeated"),
    "parts": ("earlier", "replayed", "skipped", "damaged"),
}


@dataclass(frozen=True)
class RpcMetrics:
    """Every gRPC call of this process; the interceptor moves them."""

    requests: Counter
    seconds: Histogram
    running: Gauge
    draining: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            requests=_counter(
                registry,
                "requests",
                "gRPC calls that ended, by status code.",
                "method",
                "grpc_code",
            ),
            seconds=_histogram(
                registry, "request_seconds", "Length of gRPC calls.", E2E_S, "method"
            ),
            running=_gauge(registry, "requests_in_flight", "gRPC calls now open.", "method"),
            draining=_gauge(
                registry,
                "draining",
                "1 from the moment this process refuses new calls because it stops.",
            ),
        )


@dataclass(frozen=True)
class RouterMetrics:
    """What clients experience, and how the router decided."""

    ttft_s: Histogram
    tpot_s: Histogram
    itl_s: Histogram
    e2e_s: Histogram
    stage_s: Histogram
    prompt_tokens: Counter
    completion_tokens: Counter
    queue_depth: Gauge
    queue_oldest_s: Gauge
    running: Gauge
    refused: Counter
    dropped: Counter
    decisions: Counter
    pick_s: Histogram
    retries: Counter
    migrations: Counter
    resumptions: Counter
    discovery_errors: Counter
    workers: Gauge
    cache_predictions: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            ttft_s=_histogram(
                registry, "ttft_seconds", "Request received to first token sent.", TTFT_S
            ),
            tpot_s=_histogram(
                registry,
                "tpot_seconds",
                "Mean time per token after the first, per request.",
                TPOT_S,
            ),
            itl_s=_histogram(
                registry, "itl_seconds", "Gap between two messages of a stream.", TPOT_S
            ),
            e2e_s=_histogram(
                registry,
                "e2e_seconds",
                "Request received to finish, by finish reason.",
                E2E_S,
                "outcome",
                zeros=("failed",),
            ),
            stage_s=_histogram(
                registry, "stage_seconds", "Time per part of a request's life.", STAGE_S, "stage"
            ),
            prompt_tokens=_counter(
                registry, "prompt_tokens", "Prompt tokens of accepted requests."
            ),
            completion_tokens=_counter(registry, "completion_tokens", "Tokens sent to clients."),
            queue_depth=_gauge(registry, "queue_depth", "Requests held back."),
            queue_oldest_s=_gauge(
                registry, "queue_oldest_seconds", "Age of the request held back longest."
            ),
            running=_gauge(
                registry, "router_running", "Requests given to a pair of workers and not ended."
            ),
            refused=_counter(
                registry,
                "router_refused",
                "Requests refused on arrival, by cause: queue_full, wait (longer than the limit), "
                "deadline (it would "
                "end after it), workers (none).",
                "cause",
            ),
            dropped=_counter(
                registry,
                "router_dropped",
                "Requests refused after they had waited, before any worker had them: deadline "
                "(hopeless by now), wait "
                "(the limit), workers (none).",
                "cause",
            ),
            decisions=_counter(
                registry, "router_decisions", "Choices of a worker.", "policy", "result"
            ),
            pick_s=_histogram(registry, "router_pick_seconds", "Time one choice took.", PICK_S),
            retries=_counter(
                registry,
                "router_retries",
                "Requests given to another worker.",
                "role",
                "reason",
                zeros=product(("prefill", "decode"), FAILURES),
            ),
            migrations=_counter(
                registry,
                "migrations",
                "Requests that moved to another decode pool: theirs was lost, drained or late.",
                "type",
                "outcome",
                zeros=product(("lost", "drained", "held_up"), ("resumed", "failed")),
            ),
            resumptions=_counter(
                registry, "resumptions", "Answers that another router began and that went on here."
            ),
            discovery_errors=_counter(
                registry,
                "discovery_errors",
                "Times workers could not be looked up; the last known ones stay.",
                "kind",
                zeros=(("dns",), ("kubernetes",)),
            ),
            workers=_gauge(registry, "router_workers", "Workers known, by state.", "role", "state"),
            cache_predictions=_counter(
                registry,
                "router_cache_predictions",
                "Prompts by whether prefill reused as many tokens as it had reported, more or "
                "fewer.",
                "outcome",
                zeros=(("equal",), ("more",), ("fewer",)),
            ),
        )


@dataclass(frozen=True)
class StageMetrics:
    """The forwards of one stage of a pool, whichever; the label `stage` is its rank."""

    batch_rows: Histogram
    batch_tokens: Histogram
    step_s: Histogram
    link_bytes: Counter
    plans: Counter
    forwards: Counter
    expert_tokens: Counter
    expert_busiest: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            batch_rows=_histogram(registry, "batch_rows", "Requests per forward.", ROWS),
            batch_tokens=_histogram(registry, "batch_tokens", "New tokens per forward.", TOKENS),
            step_s=_histogram(
                registry,
                "pp_stage_step_seconds",
                "One forward of this stage alone.",
                STEP_S,
                "stage",
            ),
            link_bytes=_counter(
                registry,
                "pp_link_bytes",
                "Bytes of the frames this stage sent to the next.",
                "stage",
            ),
            plans=_counter(
                registry,
                "plans",
                "Times attention was planned: target, draft_extend or draft_round.",
                "path",
            ),
            forwards=_counter(
                registry,
                "forwards",
                "Batches this stage ran: as a captured graph or a recording, eagerly, in two "
                "halves, or idle beside "
                "other data ranks.",
                "kind",
            ),
            expert_tokens=_counter(
                registry,
                "expert_tokens",
                "Tokens that routers gave to the experts this process has, over its layers.",
                "expert",
            ),
            expert_busiest=_gauge(
                registry,
                "expert_busiest_ratio",
                "What a layer's busiest expert got of late, over what each got on average, in the "
                "most uneven layer.",
            ),
        )


@dataclass(frozen=True)
class RefusalMetrics:
    """Messages between processes that a worker did not take."""

    refused: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            refused=_counter(
                registry,
                "refused_messages",
                "Messages of UCX and shared memory that were not taken, by channel: frames "
                "(between stages), handoff, parts"
                " (between ranks); by reason: foreign (a stranger's or another pool's), earlier "
                "(of an earlier forming), "
                "crossed (for another member), replayed, skipped (others before it are missing), "
                "damaged, oversized, late "
                "(its session is over), repeated.",
                "channel",
                "reason",
                zeros=[
                    (channel, reason) for channel, reasons in REFUSALS.items() for reason in reasons
                ],
            )
        )

    def count(self, channel: str) -> Callable[[str], object]:
        """Return what counts a refusal of this channel, given its reason."""
        return lambda reason: self.refused.labels(channel, str(reason)).inc()


@dataclass(frozen=True)
class LeaderMetrics:
    """The work of a pool, as its leader sees it."""

    queue_depth: Gauge
    queue_oldest_s: Gauge
    queue_s: Histogram
    running: Gauge
    prompt_tokens: Counter
    output_tokens: Counter
    step_s: Histogram
    idle_ratio: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            queue_depth=_gauge(registry, "queue_depth", "Requests waiting on this worker."),
            queue_oldest_s=_gauge(
                registry,
                "queue_oldest_seconds",
                "Age of the request that waits longest on this worker.",
            ),
            queue_s=_histogram(
                registry, "queue_seconds", "Time a request waited on this worker.", STAGE_S
            ),
            running=_gauge(registry, "running", "Requests that hold memory."),
            prompt_tokens=_counter(registry, "prompt_tokens", "Prompt tokens computed."),
            output_tokens=_counter(registry, "output_tokens", "Tokens drawn."),
            step_s=_histogram(
                registry,
                "pp_step_seconds",
                "One batch through all stages, launch to result.",
                STEP_S,
            ),
            idle_ratio=_gauge(
                registry,
                "pp_bubble_ratio",
                "Share of recent time stage 0 had work in flight but none to do.",
            ),
        )


@dataclass(frozen=True)
class SpeculationMetrics:
    """Drafts on a decode pool that has one."""

    drafted: Counter
    accepted: Counter
    accept_length: Histogram
    step_s: Histogram

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            drafted=_counter(registry, "spec_drafted_tokens", "Drafted tokens that were verified."),
            accepted=_counter(
                registry,
                "spec_accepted_tokens",
                "Drafted tokens that were accepted, by depth.",
                "depth",
            ),
            accept_length=_histogram(
                registry,
                "spec_accept_length",
                "Tokens a speculating request got from a pass.",
                ACCEPT_LENGTHS,
            ),
            step_s=_histogram(
                registry,
                "spec_step_seconds",
                "Time between results of verification steps.",
                STEP_S,
                "drafts",
            ),
        )


@dataclass(frozen=True)
class PoolMetrics:
    """Memory of a pool: its ids are the same on every stage."""

    pages_total: Gauge
    pages_used: Gauge
    slots_total: Gauge
    slots_used: Gauge
    usage_ratio: Gauge
    pages_held: Gauge
    leases: Gauge
    imbalances: Counter
    cache_config: Info
    compat: Info

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            pages_total=_gauge(registry, "kv_pages", "Pages of the pool."),
            pages_used=_gauge(registry, "kv_pages_used", "Pages under lease."),
            slots_total=_gauge(registry, "state_slots", "Recurrent-state slots of the pool."),
            slots_used=_gauge(registry, "state_slots_used", "Recurrent-state slots under lease."),
            usage_ratio=_gauge(
                registry, "kv_usage_ratio", "Share of the pages that is under lease."
            ),
            pages_held=_gauge(
                registry,
                "kv_pages_held_for_transfer",
                "Pages leased for bytes on their way, not for computing.",
            ),
            leases=_gauge(
                registry,
                "kv_leases",
                "Requests that hold memory, by what for; those draining are counted twice.",
                "state",
            ),
            imbalances=_counter(
                registry, "kv_imbalances", "Broken invariants, such as pages that nobody owns."
            ),
            cache_config=_info(
                registry,
                "cache_config",
                "Geometry of the pool's memory.",
                "page_size",
                "num_pages",
                "num_slots",
            ),
            compat=_info(
                registry,
                "compat",
                "What must be equal on both sides of a handoff, as a digest.",
                "hash",
            ),
        )


@dataclass(frozen=True)
class CacheMetrics:
    """What a pool keeps of prompts. Three counters and no ratio: tokens that could have been there,
    that were, and that were of use."""

    queried: Counter
    matched: Counter
    reused: Counter
    evicted: Counter
    pages: Gauge
    snapshots: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            queried=_counter(
                registry,
                "cache_queried_tokens",
                "Prompt tokens of requests that looked for cached pages.",
            ),
            matched=_counter(
                registry, "cache_matched_tokens", "Those of them whose pages were there."
            ),
            reused=_counter(
                registry,
                "cache_reused_tokens",
                "Those of them that were not computed again; on decode pools, not sent again.",
            ),
            evicted=_counter(
                registry,
                "cache_evicted_pages",
                "Pages that the cache gave up: pressure (a request needed them), flush (an "
                "operator or a lost stage).",
                "cause",
                zeros=(("pressure",), ("flush",)),
            ),
            pages=_gauge(
                registry,
                "cache_pages",
                "Pages that the cache keeps, also those that requests share.",
            ),
            snapshots=_gauge(
                registry,
                "cache_snapshots",
                "Recurrent states that the cache keeps; to decode pools they "
                "come with each prompt.",
            ),
        )


@dataclass(frozen=True)
class HandoffMetrics:
    """Handoffs, as one side's leader saw them."""

    sessions: Gauge
    transfer_s: Histogram
    bytes_moved: Counter
    failures: Counter
    handshake_s: Histogram
    handshake_failures: Counter
    leases_expired: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            sessions=_gauge(registry, "kv_sessions", "Sessions open on this pool."),
            transfer_s=_histogram(
                registry, "kv_transfer_seconds", "Session opened to everything moved.", TRANSFER_S
            ),
            bytes_moved=_counter(registry, "kv_transfer_bytes", "Bytes moved.", "kind"),
            failures=_counter(
                registry,
                "kv_transfer_failures",
                "Sessions that failed.",
                "reason",
                zeros=zip((*SESSION_FAILURES, "source_replaced")),
            ),
            handshake_s=_histogram(
                registry,
                "handshake_seconds",
                "Session opened to every stage ready to send or receive.",
                TRANSFER_S,
            ),
            handshake_failures=_counter(
                registry,
                "handshake_failures",
                "Sessions that failed before every stage was ready.",
                "reason",
                zeros=zip(SESSION_FAILURES),
            ),
            leases_expired=_counter(
                registry,
                "kv_lease_expired",
                "Requests ended because a handoff took longer than it may.",
            ),
        )


@dataclass(frozen=True)
class ArrivalMetrics:
    """What only the receiving side of handoffs can know, and what becomes of the requests."""

    exposed_s: Histogram
    integrity_failures: Counter
    unsent_bytes: Counter
    preemptions: Counter
    local_prefills: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            exposed_s=_histogram(
                registry,
                "kv_transfer_exposed_seconds",
                "First token known to everything landed and checked.",
                TRANSFER_S,
            ),
            integrity_failures=_counter(
                registry, "kv_integrity_failures", "Items whose digest did not match."
            ),
            unsent_bytes=_counter(
                registry,
                "cache_unsent_bytes",
                "Bytes of prompts that did not cross: the pool had kept them.",
            ),
            preemptions=_counter(
                registry, "preemptions", "Requests set back because pages ran out."
            ),
            local_prefills=_counter(
                registry,
                "local_prefill",
                "Prompts computed here instead of on a prefill pool.",
                "reason",
                zeros=(("preempted",), ("short_rest",)),
            ),
        )

    def preempted(self) -> None:
        """A request was set back; its prompt is to be computed again. Any thread."""
        self.preemptions.inc()
        self.local_prefills.labels("preempted").inc()


def _counter(
    registry: CollectorRegistry,
    name: str,
    text: str,
    *labels: str,
    zeros: Iterable[tuple[str, ...]] = (),
) -> Counter:
    """`zeros`: values of the labels that are exported before anything was counted."""
    counter = Counter(f"baton_{name}", text, labels, registry=registry)
    for values in zeros:
        counter.labels(*values)
    return counter


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"baton_{name}", text, labels, registry=registry)


def _info(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Info:
    """Facts rather than figures; all `labels` are given at once, by `info`."""
    info = Info(f"baton_{name}", text, registry=registry)
    info.info(dict.fromkeys(labels, ""))
    return info


def _histogram(
    registry: CollectorRegistry,
    name: str,
    text: str,
    buckets: Iterable[float],
    *labels: str,
    zeros: Iterable[str] = (),
) -> Histogram:
    """`zeros`: values of its one label that are exported before anything was observed."""
    histogram = Histogram(f"baton_{name}", text, labels, buckets=tuple(buckets), registry=registry)
    for value in zeros:
        histogram.labels(value)
    return histogram
