"""Prometheus metrics: typed instruments per role. Names are stable; units are base units.

    rpc, pool = RpcMetrics.create(registry), PoolMetrics.create(registry)       # of runtime.observe.exposition

A role creates only the instrument sets that it updates. Labels never contain values that a client
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

# Reasons why a session or an attempt may fail: those of `runtime.errors` that workers meet. Their
# counters are exported as 0 from the start, because a series that appears with its first failure
# has no increase that an alert could detect.
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
    """Metrics of every gRPC call of this process, updated by the interceptor."""

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
                "Completed gRPC calls, by status code.",
                "method",
                "grpc_code",
            ),
            seconds=_histogram(
                registry, "request_seconds", "Duration of gRPC calls.", E2E_S, "method"
            ),
            running=_gauge(registry, "requests_in_flight", "Open gRPC calls.", "method"),
            draining=_gauge(
                registry,
                "draining",
                "1 while this process rejects new calls because it stops, else 0.",
            ),
        )


@dataclass(frozen=True)
class PlannerMetrics:
    """The planner's view of the fleet, and what it did."""

    saturation: Gauge
    wanted: Gauge
    switches: Counter
    readings: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            saturation=_gauge(
                registry,
                "saturation_ratio",
                "Load of a role over the most that keeps the service level; above 1 it needs more "
                "workers, in proportion.",
                "role",
            ),
            wanted=_gauge(
                registry,
                "wanted_workers",
                "Workers of a role at which its saturation would be 1; absent until measured.",
                "role",
            ),
            switches=_counter(
                registry,
                "role_switches",
                "Switches of a worker's roles: switched, failed, or planned in a dry run.",
                "outcome",
                zeros=(("switched",), ("failed",), ("planned",)),
            ),
            readings=_counter(
                registry,
                "planner_readings",
                "Readings of a router's status.",
                "outcome",
                zeros=(("read",), ("failed",)),
            ),
        )


@dataclass(frozen=True)
class RouterMetrics:
    """Client-visible latencies, and the router's decisions."""

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
    placements: Counter
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
                registry, "ttft_seconds", "Time from request received to first token sent.", TTFT_S
            ),
            tpot_s=_histogram(
                registry,
                "tpot_seconds",
                "Mean time per output token after the first, per request.",
                TPOT_S,
            ),
            itl_s=_histogram(
                registry, "itl_seconds", "Time between two messages of a stream.", TPOT_S
            ),
            e2e_s=_histogram(
                registry,
                "e2e_seconds",
                "Time from request received to finish, by finish reason.",
                E2E_S,
                "outcome",
                zeros=("failed",),
            ),
            stage_s=_histogram(
                registry, "stage_seconds", "Duration of each stage of a request.", STAGE_S, "stage"
            ),
            prompt_tokens=_counter(
                registry, "prompt_tokens", "Prompt tokens of accepted requests."
            ),
            completion_tokens=_counter(registry, "completion_tokens", "Tokens sent to clients."),
            queue_depth=_gauge(registry, "queue_depth", "Requests queued in the router."),
            queue_oldest_s=_gauge(
                registry, "queue_oldest_seconds", "Age of the oldest request queued in the router."
            ),
            running=_gauge(registry, "router_running", "Requests running on a pair of workers."),
            refused=_counter(
                registry,
                "router_refused",
                "Requests rejected on arrival, by cause: queue_full, wait (longer than the limit), "
                "deadline (it would end after its deadline), workers (none available).",
                "cause",
            ),
            dropped=_counter(
                registry,
                "router_dropped",
                "Queued requests rejected before they reached a worker, by cause: deadline (can no "
                "longer be met), wait (the limit), workers (none available).",
                "cause",
            ),
            decisions=_counter(
                registry,
                "router_decisions",
                "Worker selections, by policy and result.",
                "policy",
                "result",
            ),
            placements=_counter(
                registry,
                "placements",
                "Requests placed on one worker of both roles (aggregated) or on two workers, by reason.",
                "kind",
                "why",
                zeros=(
                    ("aggregated", "no_handoff"),
                    ("aggregated", "handoff"),
                    ("aggregated", "load"),
                    ("disaggregated", "load"),
                    ("disaggregated", "streams"),
                    ("disaggregated", "roles"),
                ),
            ),
            pick_s=_histogram(
                registry, "router_pick_seconds", "Duration of one worker selection.", PICK_S
            ),
            retries=_counter(
                registry,
                "router_retries",
                "Retries of a request on another worker.",
                "role",
                "reason",
                zeros=product(("prefill", "decode"), FAILURES),
            ),
            migrations=_counter(
                registry,
                "migrations",
                "Requests moved to another decode pool because theirs was lost, drained or late.",
                "type",
                "outcome",
                zeros=product(("lost", "drained", "held_up"), ("resumed", "failed")),
            ),
            resumptions=_counter(
                registry,
                "resumptions",
                "Responses that another router began and this one continued.",
            ),
            discovery_errors=_counter(
                registry,
                "discovery_errors",
                "Failed worker lookups; the last known workers remain in use.",
                "kind",
                zeros=(("dns",), ("kubernetes",)),
            ),
            workers=_gauge(registry, "router_workers", "Known workers, by state.", "role", "state"),
            cache_predictions=_counter(
                registry,
                "router_cache_predictions",
                "Prompts by the number of tokens that prefill reused, compared with its report: "
                "equal, more or fewer.",
                "outcome",
                zeros=(("equal",), ("more",), ("fewer",)),
            ),
        )


@dataclass(frozen=True)
class StageMetrics:
    """Forwards of one stage of a pool; the label `stage` is its rank."""

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
                "Duration of one forward of this stage.",
                STEP_S,
                "stage",
            ),
            link_bytes=_counter(
                registry,
                "pp_link_bytes",
                "Bytes of frames sent to the next stage.",
                "stage",
            ),
            plans=_counter(
                registry,
                "plans",
                "Attention plans, by path: target, draft_extend or draft_round.",
                "path",
            ),
            forwards=_counter(
                registry,
                "forwards",
                "Batches that this stage ran: as a captured graph or a recording, eagerly, in two "
                "halves, or idle while other data ranks ran.",
                "kind",
            ),
            expert_tokens=_counter(
                registry,
                "expert_tokens",
                "Tokens routed to each expert of this process, summed over its layers.",
                "expert",
            ),
            expert_busiest=_gauge(
                registry,
                "expert_busiest_ratio",
                "Recent load of a layer's busiest expert over the layer's average, in the most "
                "uneven layer.",
            ),
        )


@dataclass(frozen=True)
class RefusalMetrics:
    """Messages between processes that a worker rejected."""

    refused: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            refused=_counter(
                registry,
                "refused_messages",
                "Rejected messages of UCX and shared memory, by channel: frames (between stages), "
                "handoff, parts (between ranks); by reason: foreign (of a stranger or another "
                "pool), earlier (of an earlier pool formation), crossed (for another member), "
                "replayed, skipped (messages before it are missing), damaged, oversized, late "
                "(its session is over), repeated.",
                "channel",
                "reason",
                zeros=[
                    (channel, reason) for channel, reasons in REFUSALS.items() for reason in reasons
                ],
            )
        )

    def count(self, channel: str) -> Callable[[str], object]:
        """Return a function that counts a rejection on this channel, given its reason."""
        return lambda reason: self.refused.labels(channel, str(reason)).inc()


@dataclass(frozen=True)
class ClientMetrics:
    """Shares of the clients that have limits of their own, and of all others together."""

    requests: Counter
    tokens: Counter
    wait_s: Counter
    refused: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            requests=_counter(
                registry, "client_requests", "Requests accepted, by client.", "client"
            ),
            tokens=_counter(
                registry,
                "client_tokens",
                "Tokens charged to clients: prompt (computed, not cached) and generated.",
                "client",
                "kind",
            ),
            wait_s=_counter(
                registry,
                "client_wait_seconds",
                "Time that requests were queued, by client.",
                "client",
            ),
            refused=_counter(
                registry,
                "client_refused",
                "Requests rejected because a quota of their client is used up.",
                "client",
                "quota",
                zeros=product(
                    ("other",),
                    (
                        "requests_per_minute",
                        "prompt_tokens_per_minute",
                        "generated_tokens_per_minute",
                        "concurrent_requests",
                    ),
                ),
            ),
        )


@dataclass(frozen=True)
class LeaderMetrics:
    """Work of a pool, as its leader sees it."""

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
            queue_depth=_gauge(registry, "queue_depth", "Requests queued on this worker."),
            queue_oldest_s=_gauge(
                registry,
                "queue_oldest_seconds",
                "Age of the oldest request queued on this worker.",
            ),
            queue_s=_histogram(
                registry, "queue_seconds", "Time a request was queued on this worker.", STAGE_S
            ),
            running=_gauge(registry, "running", "Requests that hold memory."),
            prompt_tokens=_counter(registry, "prompt_tokens", "Prompt tokens prefilled."),
            output_tokens=_counter(registry, "output_tokens", "Tokens sampled."),
            step_s=_histogram(
                registry,
                "pp_step_seconds",
                "Time of one batch through all stages, from launch to result.",
                STEP_S,
            ),
            idle_ratio=_gauge(
                registry,
                "pp_bubble_ratio",
                "Share of recent time in which stage 0 was idle while batches were in flight.",
            ),
        )


@dataclass(frozen=True)
class SpeculationMetrics:
    """Drafts of a decode pool that speculates."""

    drafted: Counter
    accepted: Counter
    accept_length: Histogram
    step_s: Histogram

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            drafted=_counter(
                registry,
                "spec_drafted_tokens",
                "Draft tokens that were verified, by proposer.",
                "proposer",
            ),
            accepted=_counter(
                registry,
                "spec_accepted_tokens",
                "Draft tokens that were accepted, by proposer and depth.",
                "proposer",
                "depth",
            ),
            accept_length=_histogram(
                registry,
                "spec_accept_length",
                "Tokens that a request gained per verification step.",
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
    """Memory of a pool; page and slot ids are the same on every stage."""

    pages_total: Gauge
    pages_used: Gauge
    slots_total: Gauge
    slots_used: Gauge
    usage_ratio: Gauge
    pages_held: Gauge
    leases: Gauge
    imbalances: Counter
    roles: Gauge
    cache_config: Info
    compat: Info

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            pages_total=_gauge(registry, "kv_pages", "KV-cache pages of the pool."),
            pages_used=_gauge(registry, "kv_pages_used", "KV-cache pages under lease."),
            slots_total=_gauge(registry, "state_slots", "Recurrent-state slots of the pool."),
            slots_used=_gauge(registry, "state_slots_used", "Recurrent-state slots under lease."),
            usage_ratio=_gauge(registry, "kv_usage_ratio", "Share of KV-cache pages under lease."),
            pages_held=_gauge(
                registry,
                "kv_pages_held_for_transfer",
                "Pages leased for transfers in progress rather than for computing.",
            ),
            leases=_gauge(
                registry,
                "kv_leases",
                "Requests that hold memory, by state; draining ones are counted twice.",
                "state",
            ),
            imbalances=_counter(
                registry, "kv_imbalances", "Broken invariants, such as pages without an owner."
            ),
            roles=_gauge(
                registry,
                "pool_roles",
                "Whether the pool takes requests of a role that it can serve (1) or not (0).",
                "role",
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
                "Compatibility digest, which must match on both sides of a handoff.",
                "hash",
            ),
        )


@dataclass(frozen=True)
class CacheMetrics:
    """Prefix cache of a pool.

    Three counters replace a ratio: tokens that could have been cached, tokens that were, and tokens
    that were reused.
    """

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
                "Prompt tokens looked up in the prefix cache.",
            ),
            matched=_counter(
                registry, "cache_matched_tokens", "Prompt tokens found in the prefix cache."
            ),
            reused=_counter(
                registry,
                "cache_reused_tokens",
                "Cached prompt tokens that were reused: not computed, or on decode pools not sent, again.",
            ),
            evicted=_counter(
                registry,
                "cache_evicted_pages",
                "Pages evicted from the prefix cache, by cause: pressure (a request needed them), "
                "flush (an operator or a lost stage).",
                "cause",
                zeros=(("pressure",), ("flush",)),
            ),
            pages=_gauge(
                registry,
                "cache_pages",
                "Pages in the prefix cache, including those that requests share.",
            ),
            snapshots=_gauge(
                registry,
                "cache_snapshots",
                "Recurrent states in the prefix cache; decode pools receive one with each prompt.",
            ),
        )


@dataclass(frozen=True)
class AdapterMetrics:
    """LoRA adapters of a pool."""

    adapters: Gauge
    num_bytes: Gauge
    max_bytes: Gauge
    requests: Gauge
    loads: Counter
    load_s: Histogram
    evictions: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            adapters=_gauge(
                registry,
                "adapters",
                "Adapters that requests may have, by state: loaded (in memory), or cold (loaded when a "
                "request needs it).",
                "state",
            ),
            num_bytes=_gauge(
                registry, "adapter_memory_used_bytes", "Memory of the loaded adapters."
            ),
            max_bytes=_gauge(
                registry, "adapter_memory_limit_bytes", "Memory for adapters (--adapters-mb)."
            ),
            requests=_gauge(
                registry,
                "adapter_requests",
                "Requests that have an adapter, by its name; those that wait until it is loaded, too.",
                "adapter",
            ),
            loads=_counter(
                registry,
                "adapter_loads",
                "Loads of adapters while the pool serves, by result: loaded or failed.",
                "result",
                zeros=(("loaded",), ("failed",)),
            ),
            load_s=_histogram(
                registry,
                "adapter_load_seconds",
                "Time to load an adapter on all stages, with the wait for memory.",
                STAGE_S,
            ),
            evictions=_counter(
                registry,
                "adapter_evictions",
                "Adapters that left memory because another one needed it.",
            ),
        )


@dataclass(frozen=True)
class PullMetrics:
    """Blocks that a pool gets from the prefix caches of others, and gives to them."""

    blocks: Counter
    seconds: Histogram
    lent: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            blocks=_counter(
                registry,
                "pull_blocks",
                "Blocks that another pool had in its prefix cache, one per page, by what happened: "
                "read, missing (the other pool did not send them), slower (not asked for, because it "
                "takes longer than to compute them).",
                "event",
                zeros=(("read",), ("missing",), ("slower",)),
            ),
            seconds=_histogram(
                registry,
                "pull_seconds",
                "Time to receive a prompt's blocks from another pool on all stages.",
                STAGE_S,
            ),
            lent=_counter(
                registry, "lent_blocks", "Blocks of the prefix cache that were sent to other pools."
            ),
        )


@dataclass(frozen=True)
class DiskMetrics:
    """Disk cache of a pool."""

    blocks: Counter
    read_s: Histogram
    num_bytes: Gauge

    @classmethod
    def create(cls, registry: CollectorRegistry) -> Self:
        return cls(
            blocks=_counter(
                registry,
                "disk_cache_blocks",
                "Blocks of the disk cache, one per page, by what happened: written, read, missing "
                "(removed or damaged before they were read), slower (not read, because it takes longer "
                "than to compute them), skipped (not written, because too many waited).",
                "event",
                zeros=(("written",), ("read",), ("missing",), ("slower",), ("skipped",)),
            ),
            read_s=_histogram(
                registry,
                "disk_cache_read_seconds",
                "Time to read a prompt's blocks from the disk cache on all stages.",
                STAGE_S,
            ),
            num_bytes=_gauge(
                registry,
                "disk_cache_used_bytes",
                "Size of the folder of the disk cache, without what others have written lately.",
            ),
        )


@dataclass(frozen=True)
class HandoffMetrics:
    """Handoffs, as the leader of one side sees them."""

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
            sessions=_gauge(registry, "kv_sessions", "Open handoff sessions of this pool."),
            transfer_s=_histogram(
                registry,
                "kv_transfer_seconds",
                "Time from session opened to all data moved.",
                TRANSFER_S,
            ),
            bytes_moved=_counter(
                registry, "kv_transfer_bytes", "Bytes transferred, by kind.", "kind"
            ),
            failures=_counter(
                registry,
                "kv_transfer_failures",
                "Failed handoff sessions, by reason.",
                "reason",
                zeros=zip((*SESSION_FAILURES, "source_replaced")),
            ),
            handshake_s=_histogram(
                registry,
                "handshake_seconds",
                "Time from session opened to every stage ready to send or receive.",
                TRANSFER_S,
            ),
            handshake_failures=_counter(
                registry,
                "handshake_failures",
                "Handoff sessions that failed before every stage was ready, by reason.",
                "reason",
                zeros=zip(SESSION_FAILURES),
            ),
            leases_expired=_counter(
                registry,
                "kv_lease_expired",
                "Requests ended because a handoff exceeded its time limit.",
            ),
        )


@dataclass(frozen=True)
class ArrivalMetrics:
    """Metrics of the receiving side of handoffs, and of its requests."""

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
                "Time from first token known to all data received and verified.",
                TRANSFER_S,
            ),
            integrity_failures=_counter(
                registry, "kv_integrity_failures", "Received items whose digest did not match."
            ),
            unsent_bytes=_counter(
                registry,
                "cache_unsent_bytes",
                "Bytes of prompts that were not transferred because the pool had cached them.",
            ),
            preemptions=_counter(
                registry, "preemptions", "Requests preempted because pages ran out."
            ),
            local_prefills=_counter(
                registry,
                "local_prefill",
                "Prompts prefilled on this decode pool instead of a prefill pool.",
                "reason",
                zeros=(("preempted",), ("short_rest",), ("own_prompt",), ("in_place",)),
            ),
        )

    def preempted(self) -> None:
        """Count a preempted request, whose prompt is computed again. Thread-safe."""
        self.preemptions.inc()
        self.local_prefills.labels("preempted").inc()


def _counter(
    registry: CollectorRegistry,
    name: str,
    text: str,
    *labels: str,
    zeros: Iterable[tuple[str, ...]] = (),
) -> Counter:
    """Create a counter; `zeros` are label values that are exported before anything was counted."""
    counter = Counter(f"baton_{name}", text, labels, registry=registry)
    for values in zeros:
        counter.labels(*values)
    return counter


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"baton_{name}", text, labels, registry=registry)


def _info(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Info:
    """Create facts rather than figures; `info` sets all `labels` at once."""
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
    """Create a histogram; `zeros` are label values that are exported before any observation."""
    histogram = Histogram(f"baton_{name}", text, labels, buckets=tuple(buckets), registry=registry)
    for value in zeros:
        histogram.labels(value)
    return histogram
