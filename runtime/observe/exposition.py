"""Prometheus endpoint of a process: one registry, served from a thread. A role may add pages.

registry = new_registry(role="decode", version="0.1.0")
exposition = Exposition.start(registry, port=0)             # exposition.port; exposition.close()
"""

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from socketserver import ThreadingMixIn
from types import MappingProxyType
from typing import NamedTuple, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    make_wsgi_app,
)

from runtime.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_SCRAPES = 16  # concurrent connections, each with a thread
SCRAPE_SILENCE_S = 10.0
ACCEPT_PAUSE_S = 0.1

# Pages load nothing from elsewhere, and no other page may frame them.
_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
)


class PageBody(NamedTuple):
    """Answer to a request for a page."""

    content_type: str
    content: bytes
    status: int = 200


Page = Callable[[], PageBody]
"""A page, which a thread of the exposition makes for each request."""

# Type in the base class; over TCP it is the socket.
_AcceptedSocket = socket.socket | tuple[bytes, socket.socket]


def new_registry(*, role: str, version: str) -> CollectorRegistry:
    """Return a registry with process metrics (memory, CPU, descriptors, garbage collection)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    Info("baton_build", "Role and version of this process.", registry=registry).info(
        {"role": role, "version": version}
    )
    return registry


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_SILENCE_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's signature
        """Ignore the message: scrapes are not logged."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Server with one thread per connection, for at most `MAX_SCRAPES` connections.

    A further connection closes the oldest one, so that idle connections lock out no scraper.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._open: OrderedDict[_AcceptedSocket, None] = OrderedDict()
        self._open_lock = threading.Lock()
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection.

        Without a free descriptor the connection stays queued and the next attempt would fail at
        once, so a failure pauses to avoid a busy loop.
        """
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: _AcceptedSocket, client_address: object) -> None:
        with self._open_lock:
            if len(self._open) >= MAX_SCRAPES:
                _cut(self._open.popitem(last=False)[0])
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: _AcceptedSocket) -> None:
        with self._open_lock:
            self._open.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: _AcceptedSocket, client_address: object) -> None:
        """Log the failure of one connection: its client left, was silent or was cut off."""
        logger.debug("a scrape by %s failed", client_address, exc_info=True)


def _with_pages(metrics: WSGIApplication, pages: Mapping[str, Page]) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        page = pages.get(environ.get("PATH_INFO") or "/")
        if page is None:
            return metrics(environ, start_response)
        method = environ["REQUEST_METHOD"]
        is_read = method in ("GET", "HEAD")
        body = page() if is_read else PageBody("text/plain", b"only GET\n", status=405)
        head = (("Content-Type", body.content_type), ("Content-Length", str(len(body.content))))
        status = HTTPStatus(body.status)
        start_response(f"{status.value} {status.phrase}", [*head, *_HEADERS])
        return [] if method == "HEAD" else [body.content]

    return app


def _cut(connection: _AcceptedSocket) -> None:
    """Shut down a connection, which ends its thread."""
    assert isinstance(connection, socket.socket)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a connection to /metrics is gone already")


class Exposition:
    """Server of /metrics, on its own thread."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        return self._server.server_port

    @classmethod
    def start(
        cls,
        registry: CollectorRegistry,
        *,
        port: int,
        host: str = "127.0.0.1",
        pages: Mapping[str, Page] = MappingProxyType({}),
    ) -> Self:
        """Listen; port 0 lets the system choose. Paths other than those of `pages` give the metrics.

        Raises ConfigError naming the address.
        """
        try:
            family, *_, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            server = _MetricsServer(family, (str(address[0]), port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error}", field="metrics_port"
            ) from error
        server.set_app(_with_pages(make_wsgi_app(registry), pages))
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        return cls(server, thread)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
