"""Prometheus configuration for the processes of a local cluster, whose ports the system chose."""

import json
from collections.abc import Mapping
from pathlib import Path

from runtime.config import Address, parse_address
from runtime.process.announce import Announcement

INTERVAL_S = 5


RULES = Path(__file__).parent.parent / "deploy" / "alerts" / "rules.yaml"  # of a checkout


def scrape_config(processes: Mapping[str, Announcement], rules: Path = RULES) -> str:
    """Return YAML with a job per role; the label `process` is the key, such as "decode-0.1".

    Prometheus also loads the alert rules, if they are there.
    """
    roles: dict[str, list[str]] = {}
    for name, announcement in processes.items():
        if announcement.metrics_port is not None:
            target = Address(parse_address(announcement.address).host, announcement.metrics_port)
            entry = f"      - targets: [{json.dumps(str(target))}]\n        labels: {{process: {json.dumps(name)}}}\n"
            roles.setdefault(name.partition("-")[0], []).append(entry)
    jobs = (
        f"  - job_name: {role}\n    static_configs:\n{''.join(entries)}"
        for role, entries in roles.items()
    )
    files = f"rule_files: [{json.dumps(str(rules))}]\n" if rules.is_file() else ""
    return f"global: {{scrape_interval: {INTERVAL_S}s}}\n{files}scrape_configs:\n{''.join(jobs)}"
