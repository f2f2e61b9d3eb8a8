"""Panels of the dashboards. `tools.dashboards` converts them to Grafana's JSON, and `tools.pictures` to
pictures."""
