"""The dashboard of prefix caches, pulls and disks."""

from tools.panels.queries import (
    Dashboard,
    Panel,
    PanelQuery,
    of,
    of_role,
    only,
    quantiles,
    rate,
    ratio,
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
                    ratio(
                        rate("baton_cache_reused_tokens_total", "instance"),
                        rate("baton_cache_queried_tokens_total", "instance"),
                    ),
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Prompt tokens by tier",
            "short",
            "Per second: computed, or from the worker's memory, another worker's, its host, disk or a server.",
            (PanelQuery(rate("baton_router_tier_tokens_total", "tier"), "{{tier}}"),),
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
            "Sessions",
            "short",
            "Pages that are kept longer for sessions, and sessions that have any.",
            (
                PanelQuery(of("baton_cache_retained_pages"), "pages {{instance}}"),
                PanelQuery(of("baton_cache_sessions"), "sessions {{instance}}"),
            ),
        ),
        Panel(
            "Hints",
            "cps",
            "Hints about caches in requests, and what became of them.",
            (
                PanelQuery(
                    rate("baton_router_kv_hints_total", "action, outcome"), "{{action}} {{outcome}}"
                ),
            ),
        ),
        Panel(
            "Tiers",
            "short",
            "Pages per second that were copied to host memory, disk or a cache server, or from there, or "
            "not, and why.",
            (
                PanelQuery(
                    rate("baton_cache_tier_blocks_total", "tier, event"), "{{tier}} {{event}}"
                ),
            ),
        ),
        Panel(
            "Reading from tiers",
            "s",
            "Time per prompt; its request waits for it.",
            quantiles("baton_cache_tier_read_seconds"),
        ),
        Panel(
            "Size of tiers",
            "bytes",
            "Of host memory for each worker, of the folder on disk, and of the cache server.",
            (PanelQuery(of("baton_cache_tier_used_bytes"), "{{instance}} {{tier}}"),),
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
