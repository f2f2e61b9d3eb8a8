"""Panels as plain values, and the queries in them.

Every selector uses `of`, which adds the namespace selected on the dashboard. A metric that several roles
export is restricted to one role by its process's `baton_build_info`.
"""

from dataclasses import dataclass

RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class PanelQuery:
    """A PromQL expression and the legend of its series, in which `{{label}}` is replaced."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One graph. `unit` is Grafana's name of a unit."""

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
    """Return a selector within the selected namespace."""
    return f'{name}{{namespace=~"$namespace"{"," if matchers else ""}{matchers}}}'


def rate(name: str, by: str = "", matchers: str = "") -> str:
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({of(name, matchers)}{RATE}))"


def only(role: str, expr: str) -> str:
    """Restrict `expr` to series exported by processes of a role. They need `job` and `instance`."""
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


def ratio(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"
