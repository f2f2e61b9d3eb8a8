"""What the dashboards show: panels as plain values. `tools.dashboards` turns them into Grafana's
JSON, and `tools.pictures` into pictures.

Every selector goes through `of`, which adds the namespace that is chosen on the dashboard. A metric
that several roles export is narrowed to one of them by its process's `baton_build_info`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

RATE = "[$__rate_interval]"
WIDTH = 8  # three panels side by side


@dataclass(frozen=True)
class PanelQuery:
    """A PromQL expression, and how its series are called: `{{label}}` is replaced."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One graph. `unit` is Grafana's name of it."""

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
    """A selector within the chosen namespace."""
    return f'{name}{{namespace=~"$namespace"{"," if matchers else ""}{matchers}}}'


def rate(name: str, by: str = "", matchers: str = "") -> str:
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({of(name, matchers)}{RATE}))"


def only(role: str, expr: str) -> str:
    """The series of `expr` that processes of this role export; needs `job` and `instance` on
    them."""
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
    "Request received to first token sent.",
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
    "Inter-token latency as a client sees it.",
    quantiles("baton_itl_seconds"),
)
EXPOSED = Panel(
    "Exposed transfer time",
    "s",
    "First token known to everything landed: what a handoff costs.",
    quantiles("baton_kv_transfer_exposed_seconds"),
)
STAGES = Panel(
    "Where a request's time goes",
    "s",
    "Mean per part of its life; parts overlap.",
    (PanelQuery(mean("baton_stage_seconds", "stage"), "{{stage}}"),),
)
WORKERS = Panel(
    "Workers a router can use",
    "short",
    "The least that any router sees.",
    (PanelQuery(f"min by (role, state) ({of('baton_router_workers')})", "{{role}} {{state}}"),),
)
BUBBLES = Panel(
    "Pipeline bubble ratio",
    "percentunit",
    "Share of time stage 0 had work in flight and none to do.",
    (PanelQuery(of("baton_pp_bubble_ratio"), "{{job}} {{instance}}"),),
)
ACCEPT_LENGTH = Panel(
    "Tokens per verification",
    "short",
    "What a request got from one pass of the target model.",
    (PanelQuery(mean("baton_spec_accept_length"), "mean"), *quantiles("baton_spec_accept_length")),
)
SETBACKS = Panel(
    "Set back and computed again",
    "cps",
    "Requests that lost their pages, prompts computed on decode.",
    (
        PanelQuery(rate("baton_preemptions_total", "instance"), "set back {{instance}}"),
        PanelQuery(
            rate("baton_local_prefill_total", "instance, reason"), "again {{instance}} {{reason}}"
        ),
    ),
)

OVERVIEW = Dashboard(
    "baton-overview",
    "Baton / Overview",
    "What users experience, and whether anything is wrong.",
    (
        Panel(
            "Requests",
            "reqps",
            "Ended per second, by how they ended.",
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
            "Prompt tokens taken and completion tokens sent, per second.",
            (
                PanelQuery(of_role("router", "baton_prompt_tokens_total"), "prompt"),
                PanelQuery(rate("baton_completion_tokens_total"), "completion"),
            ),
        ),
        TTFT,
        TPOT,
        ITL,
        Panel("Whole request", "s", "Received to finish.", quantiles("baton_e2e_seconds")),
        STAGES,
        EXPOSED,
        Panel(
            "Waiting",
            "short",
            "Requests held back, by where.",
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
            "Requests that a pair of workers has.",
            (PanelQuery(f"sum ({of('baton_router_running')})", "running"),),
        ),
        WORKERS,
        Panel(
            "Pages under lease",
            "percentunit",
            "Per pool.",
            (PanelQuery(of("baton_kv_usage_ratio"), "{{job}} {{instance}}"),),
        ),
        Panel(
            "State slots under lease",
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
    "Prompts: waiting, computing, waiting for their handoff.",
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
            "Prompts that wait.",
            (PanelQuery(only("prefill", of("baton_queue_depth")), "{{instance}}"),),
        ),
        Panel(
            "Oldest in the queue",
            "s",
            "Age of the prompt that waits longest.",
            (PanelQuery(only("prefill", of("baton_queue_oldest_seconds")), "{{instance}}"),),
        ),
        Panel(
            "Time in the queue",
            "s",
            "Arrival to start.",
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
            "First chunk to first token.",
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
            "Memory held, by what for",
            "short",
            "Requests with pages: computing, or kept for their handoff.",
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
            "Prompt is done, decode has not committed.",
            (PanelQuery(only("prefill", of("baton_kv_pages_held_for_transfer")), "{{instance}}"),),
        ),
    ),
)

DECODE = Dashboard(
    "baton-decode",
    "Baton / Decode and pipeline",
    "Running requests, memory, stages.",
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
            "Memory held, by what for",
            "short",
            "Requests with pages: landing, or running.",
            (PanelQuery(f"sum by (state) ({only('decode', of('baton_kv_leases'))})", "{{state}}"),),
        ),
        Panel(
            "Pages",
            "short",
            "Under lease, and all.",
            (
                PanelQuery(only("decode", of("baton_kv_pages_used")), "used {{instance}}"),
                PanelQuery(only("decode", of("baton_kv_pages")), "all {{instance}}"),
            ),
        ),
        SETBACKS,
        Panel(
            "Committed to first step",
            "s",
            "How long a landed request waits for its turn.",
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
            "One forward, by stage",
            "s",
            "Each stage alone: uneven stages make bubbles.",
            (
                PanelQuery(
                    mean("baton_pp_stage_step_seconds", "job, stage"), "{{job}} stage {{stage}}"
                ),
            ),
        ),
        Panel(
            "One batch through all stages",
            "s",
            "Launch to result, as stage 0 saw it.",
            quantiles("baton_pp_step_seconds"),
        ),
        Panel(
            "Between stages",
            "Bps",
            "Bytes of the frames a stage sends to the next.",
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
            "Processes that refuse new calls because they stop.",
            (PanelQuery(f"sum by (job) ({of('baton_draining')})", "{{job}}"),),
        ),
    ),
)

HANDOFF = Dashboard(
    "baton-handoff",
    "Baton / Handoff",
    "State on its way from prefill to decode.",
    (
        EXPOSED,
        Panel(
            "Transfer time",
            "s",
            "Session opened to everything moved; most of it hides behind the prompt.",
            quantiles("baton_kv_transfer_seconds"),
        ),
        Panel(
            "Handshake",
            "s",
            "Session opened to every stage ready.",
            quantiles("baton_handshake_seconds"),
        ),
        Panel(
            "Bytes landed",
            "Bps",
            "By kind, over all stages.",
            (PanelQuery(of_role("decode", "baton_kv_transfer_bytes_total", "kind"), "{{kind}}"),),
        ),
        Panel(
            "Open sessions",
            "short",
            "Handoffs under way.",
            (PanelQuery(of("baton_kv_sessions"), "{{job}} {{instance}}"),),
        ),
        Panel(
            "Pages held for transfer",
            "short",
            "On both sides.",
            (PanelQuery(of("baton_kv_pages_held_for_transfer"), "{{job}} {{instance}}"),),
        ),
        Panel(
            "Sessions that failed",
            "cps",
            "By reason.",
            (PanelQuery(rate("baton_kv_transfer_failures_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Handshakes that failed",
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
    "What drafts cost and what they give.",
    (
        ACCEPT_LENGTH,
        Panel(
            "Accepted share",
            "percentunit",
            "Of the drafted tokens.",
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
            "Share of verified requests that accepted a token this deep.",
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
                PanelQuery(rate("baton_spec_drafted_tokens_total"), "drafted"),
                PanelQuery(rate("baton_spec_accepted_tokens_total"), "accepted"),
            ),
        ),
        Panel(
            "Step time",
            "s",
            "Between results of steps with drafts and without.",
            (PanelQuery(mean("baton_spec_step_seconds", "drafts"), "drafts: {{drafts}}"),),
        ),
        Panel(
            "Output tokens",
            "short",
            "Drawn per second by decode pools.",
            (PanelQuery(of_role("decode", "baton_output_tokens_total"), "drawn"),),
        ),
    ),
)

ROUTER = Dashboard(
    "baton-router",
    "Baton / Router",
    "Which worker gets what, what is repeated, what clients get.",
    (
        Panel(
            "Calls",
            "reqps",
            "gRPC calls that ended, by status code.",
            (PanelQuery(of_role("router", "baton_requests_total", "grpc_code"), "{{grpc_code}}"),),
        ),
        Panel(
            "Calls open",
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
            "Held back",
            "short",
            "Requests in the router's queue.",
            (PanelQuery(only("router", of("baton_queue_depth")), "{{instance}}"),),
        ),
        Panel(
            "Oldest held back",
            "s",
            "Age of the request that waits longest.",
            (PanelQuery(only("router", of("baton_queue_oldest_seconds")), "{{instance}}"),),
        ),
        Panel(
            "Time held back",
            "s",
            "Received to a pair chosen.",
            (
                PanelQuery(quantile(0.5, "baton_stage_seconds", matchers='stage="admit"'), "p50"),
                PanelQuery(quantile(0.99, "baton_stage_seconds", matchers='stage="admit"'), "p99"),
            ),
        ),
        Panel(
            "Refused",
            "cps",
            "Requests refused on arrival and after they had waited, by cause: so the rest is in time.",
            (
                PanelQuery(rate("baton_router_refused_total", "cause"), "on arrival: {{cause}}"),
                PanelQuery(rate("baton_router_dropped_total", "cause"), "waited: {{cause}}"),
            ),
        ),
        Panel(
            "Choices",
            "ops",
            "By policy and result.",
            (
                PanelQuery(
                    rate("baton_router_decisions_total", "policy, result"), "{{policy}} {{result}}"
                ),
            ),
        ),
        Panel("Time of a choice", "s", "", quantiles("baton_router_pick_seconds")),
        Panel(
            "Moved",
            "cps",
            "Requests that went on with another pair after their decode pool was lost, or could not; and "
            "answers that another router had begun.",
            (
                PanelQuery(rate("baton_migrations_total", "type, outcome"), "{{type}} {{outcome}}"),
                PanelQuery(rate("baton_resumptions_total"), "from a router"),
            ),
        ),
        Panel(
            "Tried again",
            "cps",
            "Requests given to another worker, by role and reason.",
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
    "What prompts find of earlier ones.",
    (
        Panel(
            "Prompt tokens",
            "short",
            "Per second, on prefill: of prompts that looked for pages, found, and reused.",
            tuple(
                PanelQuery(of_role("prefill", f"baton_cache_{kind}_tokens_total"), kind)
                for kind in ("queried", "matched", "reused")
            ),
        ),
        Panel(
            "Reused share",
            "percentunit",
            "Of the prompt tokens that looked for pages, per pool.",
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
            "Prompts by whether as many tokens were reused as reported, more or fewer.",
            (PanelQuery(rate("baton_router_cache_predictions_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Pages",
            "short",
            "Kept, those in use included, and all of the pool.",
            (
                PanelQuery(of("baton_cache_pages"), "kept {{instance}}"),
                PanelQuery(only("prefill", of("baton_kv_pages")), "all {{instance}}"),
            ),
        ),
        Panel(
            "Snapshots",
            "short",
            "Recurrent states that are kept.",
            (PanelQuery(of("baton_cache_snapshots"), "{{instance}}"),),
        ),
        Panel(
            "Pages given up",
            "short",
            "Per second, by cause: a request needed them, or a flush.",
            (
                PanelQuery(
                    rate("baton_cache_evicted_pages_total", "instance, cause"),
                    "{{instance}} {{cause}}",
                ),
            ),
        ),
    ),
)

DASHBOARDS: Sequence[Dashboard] = (OVERVIEW, PREFILL, DECODE, HANDOFF, SPECULATION, CACHE, ROUTER)
