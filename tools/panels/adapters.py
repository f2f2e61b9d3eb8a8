"""The dashboard of adapters."""

from tools.panels.queries import Dashboard, Panel, PanelQuery, of, quantiles, rate

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
