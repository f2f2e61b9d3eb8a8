"""The dashboard of speculation."""

from tools.panels.overview import ACCEPT_LENGTH
from tools.panels.queries import Dashboard, Panel, PanelQuery, mean, of_role, rate, ratio

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
                    ratio(
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
