"""The dashboard of a whole cluster, and panels that others show as well."""

from tools.panels.queries import (
    Dashboard,
    Panel,
    PanelQuery,
    mean,
    of,
    of_role,
    quantiles,
    rate,
    ratio,
)

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
                    ratio(
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
                    ratio(of("baton_state_slots_used"), of("baton_state_slots")),
                    "{{job}} {{instance}}",
                ),
            ),
        ),
        BUBBLES,
    ),
)
