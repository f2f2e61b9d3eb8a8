"""The dashboard of routers."""

from tools.panels.overview import WORKERS
from tools.panels.queries import (
    Dashboard,
    Panel,
    PanelQuery,
    of,
    of_role,
    only,
    quantile,
    quantiles,
    rate,
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
            "Requests in the router's queue, and those that gave way to more urgent ones and wait to resume.",
            (
                PanelQuery(only("router", of("baton_queue_depth")), "{{instance}}"),
                PanelQuery(of("baton_router_paused"), "paused by {{instance}}"),
            ),
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
