"""Choice of the tracing implementation, so that only a process that traces needs OpenTelemetry."""

from runtime.errors import ConfigError
from runtime.observe.tracing import UNTRACED, Tracing


def open_tracing(endpoint: str, *, role: str, worker: str) -> Tracing:
    """Return the tracing for an endpoint; an empty endpoint disables tracing.

    `endpoint` is the URL of an OTLP collector over gRPC, such as http://127.0.0.1:4317.

    Raises ConfigError if OpenTelemetry is not installed or the endpoint is not a URL.
    """
    check_endpoint(endpoint)
    if not endpoint:
        return UNTRACED
    try:
        from runtime.observe.otel import OtelTracing
    except ImportError as error:
        raise ConfigError(
            "otel_endpoint needs OpenTelemetry: pip install 'baton[otel]'", field="otel_endpoint"
        ) from error
    return OtelTracing.to_collector(endpoint, role=role, worker=worker)


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError unless the endpoint is a URL or empty."""
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otel_endpoint must be like http://127.0.0.1:4317, got {endpoint!r}",
            field="otel_endpoint",
        )
