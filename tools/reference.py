"""Writer of the reference pages generated from the code.

Run `python -m tools.reference` after a change of their sources:

docs/configuration.md  from the settings of the roles and the commands
docs/metrics.md        from runtime.observe.catalogue
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from runtime.observe.catalogue import Family, families
from tools.settings_page import configuration_page

ROOT = Path(__file__).parent.parent

_METRICS_HEAD = """# Metrics

<!-- Made from the code by `python -m tools.reference`; edit the texts in runtime/observe/metrics/. -->

Every process serves these metrics at `/metrics` (`--metrics-port`). Names, types, labels and units are fixed at 0.1
(`deploy/metrics.yaml`). Histograms also have `_bucket`, `_sum` and `_count`. A *follower* is a stage other than its
pool's leader. Labels never contain values chosen by a client. The usual `process_*` and `python_*` metrics are also
exported. Requests on a router's call to a worker count as separate calls, as `/baton.v1.Prefill/Run` and
`/baton.v1.Decode/Generate`.

`baton up` writes a Prometheus configuration for its processes and prints its path. For processes that you start
yourself, list their metrics ports (`components/monitoring` has PodMonitors for Kubernetes):

```yaml
scrape_configs:
  - job_name: router
    static_configs: [{targets: ["10.0.0.1:9090"]}]
  - job_name: prefill
    static_configs: [{targets: ["10.0.0.2:9090", "10.0.0.3:9090"]}]
  - job_name: decode
    static_configs: [{targets: ["10.0.0.4:9090", "10.0.0.5:9090"]}]
  - job_name: gateway  # its own metrics, named smg_*
    static_configs: [{targets: ["10.0.0.6:9090"]}]
rule_files: [deploy/alerts/rules.yaml]
```

A gateway with the model-server protocol of the Gateway API inference extension uses `baton_queue_depth`
(waiting), `baton_router_running` or `baton_running` (running), `baton_kv_usage_ratio` (share of the cache in use) and
`baton_cache_config_info` (page size and pages).

| Name | Type | Unit | Labels | Exported by | Meaning |
|---|---|---|---|---|---|
"""


def metrics_page() -> str:
    return _METRICS_HEAD + "".join(_metric_row(family) for family in families())


def _metric_row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return (
        f"| `{family.name}` | {family.kind} | {family.unit} | {labels} | {', '.join(family.roles)} | "
        f"{family.text} |\n"
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/configuration.md": configuration_page,
    "docs/metrics.md": metrics_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / name).write_text(page())


if __name__ == "__main__":
    main()
