"""The dashboard of handoffs."""

from tools.panels.overview import EXPOSED
from tools.panels.queries import Dashboard, Panel, PanelQuery, of, of_role, quantiles, rate

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
