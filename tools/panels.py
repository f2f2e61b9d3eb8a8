"""Panels of the dashboards, as plain values.

`tools.dashboards` converts them to Grafana's JSON, and `tools.pictures` to pictures. Every selector
uses `of`, which adds the namespace selected on the dashboard. A metric that several roles export is
restricted to one role by its process's `baton_build_info`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

RATE = "[$__rate_interval]"
WIDTH = 8  # three panels side by side


@dataclass(frozen=True)
class PanelQuery:
    """A PromQL expression and the legend of its series, in which `{{label}}` is replaced."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One graph. `unit` is Grafana's name of a unit."""

    title: str
    unit: str
    text: str
    queries: tuple[PanelQuery, ...]


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    text: str
    panels: tuple[Panel, ...]


def of(name: str, matchers: str = "") -> str:
    """Return a selector within the selected namespace."""
    return f'{name}{{namespace=~"$namespace"{"," if matchers else ""}{matchers}}}'


def rate(name: str, by: str = "", matchers: str = "") -> str:
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({of(name, matchers)}{RATE}))"


def only(role: str, expr: str) -> str:
    """Restrict `expr` to series exported by processes of a role. They need `job` and `instance`."""
    info = of("baton_build_info", f'role="{role}"')
    return f"{expr} and on (job, instance) {info}"


def of_role(role: str, name: str, by: str = "") -> str:
    total = f"sum by ({by})" if by else "sum"
    return f"{total} ({only(role, f'rate({of(name)}{RATE})')})"


def quantile(share: float, name: str, by: str = "", matchers: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', labels, matchers)})"


def quantiles(name: str) -> tuple[PanelQuery, ...]:
    return tuple(
        PanelQuery(quantile(share, name), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)
    )


def mean(name: str, by: str = "", matchers: str = "") -> str:
    return f"{rate(f'{name}_sum', by, matchers)} / ({rate(f'{name}_count', by, matchers)} > 0)"


def _share(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


TTFT = Panel(
    "Time to first token",
    "s",
    "From receiving a request to sending its first token.",
    quantiles("baton_ttft_seconds"),
)
TPOT = Panel(
    "Time per output token",
    "s",
    "Mean per request, after the first token.",
    quantiles("baton_tpot_seconds"),
)
ITL = Panel(
    "Gap between messages",
    "s",
    "Inter-token latency at the client.",
    quantiles("baton_itl_seconds"),
)
EXPOSED = Panel(
    "Exposed transfer time",
    "s",
    "From the first token to the end of the handoff: the cost of a handoff.",
    quantiles("baton_kv_transfer_exposed_seconds"),
)
STAGES = Panel(
    "Request time breakdown",
    "s",
    "Mean duration of each part of a request; parts overlap.",
    (PanelQuery(mean("baton_stage_seconds", "stage"), "{{stage}}"),),
)
WORKERS = Panel(
    "Usable workers",
    "short",
    "Minimum over all routers.",
    (PanelQuery(f"min by (role, state) ({of('baton_router_workers')})", "{{role}} {{state}}"),),
)
BUBBLES = Panel(
    "Pipeline bubble ratio",
    "percentunit",
    "Share of time in which stage 0 waits for batches in flight.",
    (PanelQuery(of("baton_pp_bubble_ratio"), "{{job}} {{instance}}"),),
)
ACCEPT_LENGTH = Panel(
    "Tokens per verification",
    "short",
    "Tokens of a request from one pass of the target model.",
    (PanelQuery(mean("baton_spec_accept_length"), "mean"), *quantiles("baton_spec_accept_length")),
)
SETBACKS = Panel(
    "Preemptions and recomputation",
    "cps",
    "Requests that lost their pages, and prompts computed on decode.",
    (
        PanelQuery(rate("baton_preemptions_total", "instance"), "preempted {{instance}}"),
        PanelQuery(
            rate("baton_local_prefill_total", "instance, reason"),
            "computed {{instance}} {{reason}}",
        ),
    ),
)

OVERVIEW = Dashboard(
    "baton-overview",
    "Baton / Overview",
    "Latency and throughput for users, and the state of the cluster.",
    (
        Panel(
            "Requests",
            "reqps",
            "Finished requests per second, by outcome.",
            (PanelQuery(rate("baton_e2e_seconds_count", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Failed",
            "percentunit",
            "Share of requests without a finish.",
            (
                PanelQuery(
                    _share(
                        rate("baton_e2e_seconds_count", matchers='outcome="failed"'),
                        rate("baton_e2e_seconds_count"),
                    ),
                    "failed",
                ),
            ),
        ),
        Panel(
            "Tokens",
            "short",
            "Accepted prompt tokens and sent completion tokens, per second.",
            (
                PanelQuery(of_role("router", "baton_prompt_tokens_total"), "prompt"),
                PanelQuery(rate("baton_completion_tokens_total"), "completion"),
            ),
        ),
        TTFT,
        TPOT,
        ITL,
        Panel(
            "Whole request",
            "s",
            "From receiving a request to its finish.",
            quantiles("baton_e2e_seconds"),
        ),
        STAGES,
        EXPOSED,
        Panel(
            "Waiting",
            "short",
            "Queued requests, by role.",
            (
                PanelQuery(
                    f"sum by (role) ({of('baton_queue_depth')} * on (job, instance) group_left (role) "
                    f"{of('baton_build_info')})",
                    "{{role}}",
                ),
            ),
        ),
        Panel(
            "Running",
            "short",
            "Requests assigned to a worker pair.",
            (PanelQuery(f"sum ({of('baton_router_running')})", "running"),),
        ),
        WORKERS,
        Panel(
            "Leased pages",
            "percentunit",
            "Per pool.",
            (PanelQuery(of("baton_kv_usage_ratio"), "{{job}} {{instance}}"),),
        ),
        Panel(
            "Leased state slots",
            "percentunit",
            "Per pool of a model with recurrent layers.",
            (
                PanelQuery(
                    _share(of("baton_state_slots_used"), of("baton_state_slots")),
                    "{{job}} {{instance}}",
                ),
            ),
        ),
        BUBBLES,
    ),
)

PREFILL = Dashboard(
    "baton-prefill",
    "Baton / Prefill",
    "Prompts that are queued, computed or handed over.",
    (
        Panel(
            "Prompt tokens",
            "short",
            "Computed per second.",
            (
                PanelQuery(
                    of_role("prefill", "baton_prompt_tokens_total", "instance"), "{{instance}}"
                ),
            ),
        ),
        Panel(
            "Queue",
            "short",
            "Queued prompts.",
            (PanelQuery(only("prefill", of("baton_queue_depth")), "{{instance}}"),),
        ),
        Panel(
            "Oldest in the queue",
            "s",
            "Age of the oldest queued prompt.",
            (PanelQuery(only("prefill", of("baton_queue_oldest_seconds")), "{{instance}}"),),
        ),
        Panel(
            "Time in the queue",
            "s",
            "From arrival to the first chunk.",
            (
                PanelQuery(
                    f"histogram_quantile(0.9, {of_role('prefill', 'baton_queue_seconds_bucket', 'le')})",
                    "p90",
                ),
                PanelQuery(
                    f"histogram_quantile(0.99, {of_role('prefill', 'baton_queue_seconds_bucket', 'le')})",
                    "p99",
                ),
            ),
        ),
        Panel(
            "Prompt time",
            "s",
            "From the first chunk to the first token.",
            (
                PanelQuery(
                    quantile(0.5, "baton_stage_seconds", matchers='stage="prefill_exec"'), "p50"
                ),
                PanelQuery(
                    quantile(0.99, "baton_stage_seconds", matchers='stage="prefill_exec"'), "p99"
                ),
            ),
        ),
        Panel(
            "Memory by state",
            "short",
            "Requests with pages: computing, or waiting for their handoff.",
            (
                PanelQuery(
                    f"sum by (state) ({only('prefill', of('baton_kv_leases'))})", "{{state}}"
                ),
            ),
        ),
        Panel(
            "Tokens per forward",
            "short",
            "Mean batch.",
            (
                PanelQuery(
                    f"{of_role('prefill', 'baton_batch_tokens_sum')} / "
                    f"({of_role('prefill', 'baton_batch_tokens_count')} > 0)",
                    "mean",
                ),
            ),
        ),
        Panel(
            "Requests per forward",
            "short",
            "Mean batch.",
            (
                PanelQuery(
                    f"{of_role('prefill', 'baton_batch_rows_sum')} / "
                    f"({of_role('prefill', 'baton_batch_rows_count')} > 0)",
                    "mean",
                ),
            ),
        ),
        Panel(
            "Pages held for transfer",
            "short",
            "The prompt is computed, and decode has not committed.",
            (PanelQuery(only("prefill", of("baton_kv_pages_held_for_transfer")), "{{instance}}"),),
        ),
    ),
)

DECODE = Dashboard(
    "baton-decode",
    "Baton / Decode and pipeline",
    "Running requests, memory and stages.",
    (
        Panel(
            "Output tokens",
            "short",
            "Drawn per second.",
            (
                PanelQuery(
                    of_role("decode", "baton_output_tokens_total", "instance"), "{{instance}}"
                ),
            ),
        ),
        Panel(
            "Running",
            "short",
            "Requests that hold memory.",
            (PanelQuery(only("decode", of("baton_running")), "{{instance}}"),),
        ),
        Panel(
            "Memory by state",
            "short",
            "Requests with pages: landing, or running.",
            (PanelQuery(f"sum by (state) ({only('decode', of('baton_kv_leases'))})", "{{state}}"),),
        ),
        Panel(
            "Pages",
            "short",
            "Leased pages, and all pages.",
            (
                PanelQuery(only("decode", of("baton_kv_pages_used")), "used {{instance}}"),
                PanelQuery(only("decode", of("baton_kv_pages")), "all {{instance}}"),
            ),
        ),
        SETBACKS,
        Panel(
            "Committed to first step",
            "s",
            "Wait of a landed request for its first step.",
            (
                PanelQuery(
                    quantile(0.5, "baton_stage_seconds", matchers='stage="decode_queue"'), "p50"
                ),
                PanelQuery(
                    quantile(0.99, "baton_stage_seconds", matchers='stage="decode_queue"'), "p99"
                ),
                PanelQuery(
                    quantile(0.99, "baton_stage_seconds", matchers='stage="first_step"'),
                    "first step p99",
                ),
            ),
        ),
        BUBBLES,
        Panel(
            "Forward by pipeline stage",
            "s",
            "Duration at each stage: uneven stages cause bubbles.",
            (
                PanelQuery(
                    mean("baton_pp_stage_step_seconds", "job, stage"), "{{job}} stage {{stage}}"
                ),
            ),
        ),
        Panel(
            "Batch through all pipeline stages",
            "s",
            "From launch to result, measured at stage 0.",
            quantiles("baton_pp_step_seconds"),
        ),
        Panel(
            "Between stages",
            "Bps",
            "Bytes of frames that a stage sends to the next one.",
            (
                PanelQuery(
                    rate("baton_pp_link_bytes_total", "job, stage"), "{{job}} stage {{stage}}"
                ),
            ),
        ),
        Panel(
            "Requests per forward",
            "short",
            "Mean batch.",
            (
                PanelQuery(
                    f"{of_role('decode', 'baton_batch_rows_sum')} / "
                    f"({of_role('decode', 'baton_batch_rows_count')} > 0)",
                    "mean",
                ),
            ),
        ),
        Panel(
            "Draining",
            "short",
            "Processes that drain and reject new calls.",
            (PanelQuery(f"sum by (job) ({of('baton_draining')})", "{{job}}"),),
        ),
    ),
)

HANDOFF = Dashboard(
    "baton-handoff",
    "Baton / Handoff",
    "Transfer of state from prefill to decode.",
    (
        EXPOSED,
        Panel(
            "Transfer time",
            "s",
            "From opening a session to its last byte; most of it overlaps with prefill.",
            quantiles("baton_kv_transfer_seconds"),
        ),
        Panel(
            "Handshake",
            "s",
            "From opening a session until every stage is ready.",
            quantiles("baton_handshake_seconds"),
        ),
        Panel(
            "Received bytes",
            "Bps",
            "By kind, over all stages.",
            (PanelQuery(of_role("decode", "baton_kv_transfer_bytes_total", "kind"), "{{kind}}"),),
        ),
        Panel(
            "Open sessions",
            "short",
            "Handoffs in progress.",
            (PanelQuery(of("baton_kv_sessions"), "{{job}} {{instance}}"),),
        ),
        Panel(
            "Pages held for transfer",
            "short",
            "Prefill and decode.",
            (PanelQuery(of("baton_kv_pages_held_for_transfer"), "{{job}} {{instance}}"),),
        ),
        Panel(
            "Failed sessions",
            "cps",
            "By reason.",
            (PanelQuery(rate("baton_kv_transfer_failures_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Failed handshakes",
            "cps",
            "By reason.",
            (PanelQuery(rate("baton_handshake_failures_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Damage and expiry",
            "cps",
            "Items with a wrong digest; requests whose handoff took too long.",
            (
                PanelQuery(rate("baton_kv_integrity_failures_total"), "damaged"),
                PanelQuery(rate("baton_kv_lease_expired_total"), "expired"),
            ),
        ),
    ),
)

SPECULATION = Dashboard(
    "baton-speculation",
    "Baton / Speculation",
    "Cost and gain of drafts.",
    (
        ACCEPT_LENGTH,
        Panel(
            "Accepted share",
            "percentunit",
            "Share of drafted tokens that are accepted.",
            (
                PanelQuery(
                    _share(
                        rate("baton_spec_accepted_tokens_total"),
                        rate("baton_spec_drafted_tokens_total"),
                    ),
                    "accepted",
                ),
            ),
        ),
        Panel(
            "Accepted, by depth",
            "percentunit",
            "Share of verified requests that accepted a token of this depth.",
            (
                PanelQuery(
                    f"{rate('baton_spec_accepted_tokens_total', 'depth')} / on () group_left () "
                    f"({rate('baton_spec_accept_length_count')} > 0)",
                    "depth {{depth}}",
                ),
            ),
        ),
        Panel(
            "Tokens",
            "short",
            "Drafted and accepted per second.",
            (
                PanelQuery(
                    rate("baton_spec_drafted_tokens_total", "proposer"), "drafted by {{proposer}}"
                ),
                PanelQuery(
                    rate("baton_spec_accepted_tokens_total", "proposer"), "accepted of {{proposer}}"
                ),
            ),
        ),
        Panel(
            "Step time",
            "s",
            "Time between results of steps, with and without drafts.",
            (PanelQuery(mean("baton_spec_step_seconds", "drafts"), "drafts: {{drafts}}"),),
        ),
        Panel(
            "Output tokens",
            "short",
            "Tokens generated per second by decode pools.",
            (PanelQuery(of_role("decode", "baton_output_tokens_total"), "generated"),),
        ),
    ),
)

ROUTER = Dashboard(
    "baton-router",
    "Baton / Router",
    "Placement, retries and results of calls.",
    (
        Panel(
            "Calls",
            "reqps",
            "Finished gRPC calls, by status code.",
            (PanelQuery(of_role("router", "baton_requests_total", "grpc_code"), "{{grpc_code}}"),),
        ),
        Panel(
            "Open calls",
            "short",
            "By method.",
            (
                PanelQuery(
                    f"sum by (method) ({only('router', of('baton_requests_in_flight'))})",
                    "{{method}}",
                ),
            ),
        ),
        WORKERS,
        Panel(
            "Queue",
            "short",
            "Requests in the router's queue.",
            (PanelQuery(only("router", of("baton_queue_depth")), "{{instance}}"),),
        ),
        Panel(
            "Oldest in the queue",
            "s",
            "Age of the oldest queued request.",
            (PanelQuery(only("router", of("baton_queue_oldest_seconds")), "{{instance}}"),),
        ),
        Panel(
            "Time in the queue",
            "s",
            "From receiving a request to the choice of its worker pair.",
            (
                PanelQuery(quantile(0.5, "baton_stage_seconds", matchers='stage="admit"'), "p50"),
                PanelQuery(quantile(0.99, "baton_stage_seconds", matchers='stage="admit"'), "p99"),
            ),
        ),
        Panel(
            "Rejected",
            "cps",
            "Requests rejected on arrival or dropped from the queue, by cause, and those beyond a client's quota.",
            (
                PanelQuery(rate("baton_router_refused_total", "cause"), "on arrival: {{cause}}"),
                PanelQuery(
                    rate("baton_router_dropped_total", "cause"), "from the queue: {{cause}}"
                ),
                PanelQuery(
                    rate("baton_client_refused_total", "client, quota"), "{{client}}: {{quota}}"
                ),
            ),
        ),
        Panel(
            "Tokens of clients",
            "short",
            "Prompt tokens computed and tokens generated, of clients with limits of their own and of all others.",
            (PanelQuery(rate("baton_client_tokens_total", "client, kind"), "{{client}} {{kind}}"),),
        ),
        Panel(
            "Queueing of clients",
            "s",
            "Mean time in the queue of a client's requests.",
            (
                PanelQuery(
                    f"{rate('baton_client_wait_seconds_total', 'client')} / "
                    f"{rate('baton_client_requests_total', 'client')}",
                    "{{client}}",
                ),
            ),
        ),
        Panel(
            "Placement decisions",
            "ops",
            "By policy and result.",
            (
                PanelQuery(
                    rate("baton_router_decisions_total", "policy, result"), "{{policy}} {{result}}"
                ),
            ),
        ),
        Panel(
            "Placement time",
            "s",
            "Duration of one decision.",
            quantiles("baton_router_pick_seconds"),
        ),
        Panel(
            "Migrations",
            "cps",
            "Requests moved to another pair after the loss of their decode pool, by outcome; and streams "
            "resumed from another router.",
            (
                PanelQuery(rate("baton_migrations_total", "type, outcome"), "{{type}} {{outcome}}"),
                PanelQuery(rate("baton_resumptions_total"), "resumed"),
            ),
        ),
        Panel(
            "Retries",
            "cps",
            "Requests sent to another worker, by role and reason.",
            (
                PanelQuery(
                    rate("baton_router_retries_total", "role, reason"), "{{role}} {{reason}}"
                ),
            ),
        ),
    ),
)

CACHE = Dashboard(
    "baton-cache",
    "Baton / Prefix cache",
    "Reuse of cached prompts.",
    (
        Panel(
            "Prompt tokens",
            "short",
            "Per second, on prefill: looked up, found, and reused.",
            tuple(
                PanelQuery(of_role("prefill", f"baton_cache_{kind}_tokens_total"), kind)
                for kind in ("queried", "matched", "reused")
            ),
        ),
        Panel(
            "Reused share",
            "percentunit",
            "Share of looked-up prompt tokens that were reused, per pool.",
            (
                PanelQuery(
                    _share(
                        rate("baton_cache_reused_tokens_total", "instance"),
                        rate("baton_cache_queried_tokens_total", "instance"),
                    ),
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Predictions",
            "cps",
            "Prompts by reused tokens: as many as reported, more or fewer.",
            (PanelQuery(rate("baton_router_cache_predictions_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Pages",
            "short",
            "Cached pages, including those in use, and all pages of the pool.",
            (
                PanelQuery(of("baton_cache_pages"), "cached {{instance}}"),
                PanelQuery(only("prefill", of("baton_kv_pages")), "all {{instance}}"),
            ),
        ),
        Panel(
            "Snapshots",
            "short",
            "Cached recurrent states.",
            (PanelQuery(of("baton_cache_snapshots"), "{{instance}}"),),
        ),
        Panel(
            "Disk cache",
            "short",
            "Pages per second: written, read, or not, and why.",
            (
                PanelQuery(
                    rate("baton_disk_cache_blocks_total", "instance, event"),
                    "{{instance}} {{event}}",
                ),
            ),
        ),
        Panel(
            "Reading from disk",
            "s",
            "Time per prompt; its request waits for it.",
            quantiles("baton_disk_cache_read_seconds"),
        ),
        Panel(
            "Disk",
            "bytes",
            "Size of the folder of the disk cache.",
            (PanelQuery(of("baton_disk_cache_used_bytes"), "{{instance}}"),),
        ),
        Panel(
            "Pulls",
            "short",
            "Pages per second that prefill workers took from other workers, or not, and why; and those "
            "that were lent.",
            (
                PanelQuery(
                    rate("baton_pull_blocks_total", "instance, event"), "{{instance}} {{event}}"
                ),
                PanelQuery(rate("baton_lent_blocks_total", "instance"), "{{instance}} lent"),
            ),
        ),
        Panel(
            "Pulling",
            "s",
            "Seconds per second that prompts waited for pulled pages.",
            (PanelQuery(rate("baton_pull_seconds_sum", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Evicted pages",
            "short",
            "Per second, by cause: memory pressure, or a flush.",
            (
                PanelQuery(
                    rate("baton_cache_evicted_pages_total", "instance, cause"),
                    "{{instance}} {{cause}}",
                ),
            ),
        ),
    ),
)

ADAPTERS = Dashboard(
    "baton-adapters",
    "Baton / Adapters",
    "LoRA adapters: what requests use, and what is in memory.",
    (
        Panel(
            "Requests",
            "short",
            "That have an adapter, or wait until it is loaded.",
            (
                PanelQuery(
                    f"sum by (job, adapter) ({of('baton_adapter_requests')})", "{{job}} {{adapter}}"
                ),
            ),
        ),
        Panel(
            "Adapters",
            "short",
            "In memory (loaded), and loaded when a request needs them (cold).",
            (PanelQuery(of("baton_adapters"), "{{instance}} {{state}}"),),
        ),
        Panel(
            "Memory",
            "bytes",
            "Of loaded adapters, and the limit.",
            (
                PanelQuery(of("baton_adapter_memory_used_bytes"), "used {{instance}}"),
                PanelQuery(of("baton_adapter_memory_limit_bytes"), "limit {{instance}}"),
            ),
        ),
        Panel(
            "Loads",
            "cps",
            "Per second, by result.",
            (
                PanelQuery(
                    rate("baton_adapter_loads_total", "instance, result"), "{{instance}} {{result}}"
                ),
            ),
        ),
        Panel(
            "Time to load",
            "s",
            "With the wait for memory; a request for a cold adapter waits for it.",
            quantiles("baton_adapter_load_seconds"),
        ),
        Panel(
            "Evictions",
            "cps",
            "Adapters that left memory because another one needed it.",
            (PanelQuery(rate("baton_adapter_evictions_total", "instance"), "{{instance}}"),),
        ),
    ),
)

DASHBOARDS: Sequence[Dashboard] = (
    OVERVIEW,
    PREFILL,
    DECODE,
    HANDOFF,
    SPECULATION,
    CACHE,
    ADAPTERS,
    ROUTER,
)
