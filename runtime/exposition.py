"""What a process shows to Prometheus: one registry, served from a thread.

    registry = new_registry(role="decode", version="0.1.0")
    exposition = Exposition.start(registry, port=0)             # exposition.port; exposition.close()
"""

import threading
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)

from runtime.errors import ConfigError


def new_registry(*, role: str, version: str) -> CollectorRegistry:
    """A registry with the process's own figures (memory, CPU, descriptors, garbage collection)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    Info("baton_build", "What runs here.", registry=registry).info({"role": role, "version": version})
    return registry


class Exposition:
    """Serves /metrics from a thread of its own."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        return self._server.server_port

    @classmethod
    def start(cls, registry: CollectorRegistry, *, port: int, host: str = "127.0.0.1") -> Self:
        """Listen; port 0 lets the system choose. Raises ConfigError naming the address."""
        try:
            return cls(*start_http_server(port, host, registry))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error}", field="metrics_port") from error

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
