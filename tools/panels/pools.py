"""Dashboards of prefill and decode pools."""

from tools.panels.overview import BUBBLES, SETBACKS
from tools.panels.queries import (
    Dashboard,
    Panel,
    PanelQuery,
    mean,
    of,
    of_role,
    only,
    quantile,
    quantiles,
    rate,
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
