"""gRPC server of a process, with health, reflection, error mapping and drain.

server = GrpcServer(
    ServerOptions(listen="0.0.0.0:7000"), services=("baton.v1.Prefill",), metrics=rpc_metrics
)
prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server.grpc)
address = await server.start()                       # "0.0.0.0:41873" when port 0 was given
await server.health.set_serving("baton.v1.Prefill")  # services start as NOT_SERVING, "" as SERVING
await server.drain(grace_s=30)                       # NOT_SERVING, reject, wait, end calls, stop
"""

import logging
from dataclasses import dataclass, replace

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from runtime.config import Address, parse_address
from runtime.errors import BatonError, ConfigError, DrainingError
from runtime.observe.metrics.calls import RpcMetrics
from runtime.observe.tracing import UNTRACED, Tracing
from runtime.rpc.connections import ConnectionLimits, ConnectionWatch, files_for, raised_file_limit
from runtime.rpc.interceptor import CallGuard, CallLimits
from runtime.rpc.rebinding_server import LastingServer
from runtime.security.access import OPEN_SERVER, ServerSecurity

logger = logging.getLogger(__name__)


# Costs of a connection before its calls are checked. The message of a call waits outside, except
# for one window.
MAX_METADATA_BYTES = 16 << 10
WINDOW_BYTES = 64 << 10
HANDSHAKE_S = 5.0
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
# Pings closer together than this count as strikes, and the last strike closes the connection.
# Baton's clients ping every keepalive_s.
MIN_PING_INTERVAL_S = 0.3
MAX_PING_STRIKES = 5
# `runtime.rpc.read_limits` inflates messages, because it limits their size; gRPC rejects deflate.
IDENTITY_AND_GZIP = 1 << 0 | 1 << 2
# Calls that gRPC may hold until the event loop takes them.
MAX_PENDING_CALLS = 1000
# Limits of the health port: one service name per message, a few connections.
HEALTH_MESSAGE_BYTES = 1 << 10
HEALTH_CALLS = 32
HEALTH_CONNECTIONS = 64
EXPEL_S = 1.0  # seconds for the last statuses of calls that are ended, on busy cores


@dataclass(frozen=True)
class ServerOptions:
    """Options of a gRPC server.

    `max_connection_age_s` makes clients that use a load balancer reconnect regularly; None disables
    it. `channelz` shows sockets and calls of the whole process to callers that may watch workers.
    `health_listen` is a second port that serves only health in plain text, for probes without TLS,
    such as those of Kubernetes. `max_calls` and `max_held_bytes` (of their messages) apply to the
    server, `max_streams` to each of its `max_connections`. `write_s` is the time in which a client
    must take a response.
    """

    listen: str
    max_message_bytes: int = 16 << 20
    max_calls: int = 2048
    max_held_bytes: int = 128 << 20
    max_streams: int = 1024
    max_connections: int = 1024
    write_s: float = 120.0
    keepalive_s: float = 1.5
    keepalive_timeout_s: float = 2.5
    max_connection_age_s: float | None = None
    max_connection_age_grace_s: float = 3600.0
    reflection: bool = True
    channelz: bool = False
    health_listen: str | None = None

    def connection_limits(self) -> ConnectionLimits:
        """Return the limits of connections, reduced to the available file descriptors."""
        return ConnectionLimits.within(self.max_connections, raised_file_limit())

    def as_grpc(self) -> list[tuple[str, int]]:
        """Return the options for gRPC's servers."""
        options = [
            ("grpc.so_reuseport", 0),  # makes a second server on the same port an error
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.max_allowed_incoming_connections", self.connection_limits().accepted),
            # Above a soft limit gRPC rejects at random, so both limits are the same.
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            # The probe would widen the window of unread calls to megabytes.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
            ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1e3)),
            ("grpc.per_message_decompression", 0),
            ("grpc.compression_enabled_algorithms_bitset", IDENTITY_AND_GZIP),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            # See runtime.rpc.client.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            ("grpc.keepalive_permit_without_calls", 1),
            # Clients may ping as often as Baton's channels do, even while a long prefill sends
            # nothing.
            ("grpc.http2.min_ping_interval_without_data_ms", round(MIN_PING_INTERVAL_S * 1e3)),
            ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        if self.max_connection_age_s is not None:
            options += [
                ("grpc.max_connection_age_ms", round(self.max_connection_age_s * 1e3)),
                ("grpc.max_connection_age_grace_ms", round(self.max_connection_age_grace_s * 1e3)),
            ]
        return options


class Health:
    """Health service (grpc.health.v1) with Watch.

    The name "" is the health of the process; full service names are their readiness.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = services
        self.servicer = health.aio.HealthServicer()

    async def start(self) -> None:
        for service in self._services:
            await self.set_not_serving(service)

    async def set_serving(self, service: str) -> None:
        await self.servicer.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def set_not_serving(self, service: str) -> None:
        await self.servicer.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def shut_down(self) -> None:
        """Report NOT_SERVING for all names, permanently."""
        await self.servicer.enter_graceful_shutdown()


class GrpcServer:
    """gRPC server of a process. Build it inside a running event loop.

    `calls` tracks the open calls. `services` are the full names whose readiness this process
    reports, `also_served` are services without a readiness. `background_methods` are endless
    streams for which a drain does not wait.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        services: tuple[str, ...],
        metrics: RpcMetrics,
        security: ServerSecurity = OPEN_SERVER,
        background_methods: frozenset[str] = frozenset(),
        tracing: Tracing = UNTRACED,
        also_served: tuple[str, ...] = (),
    ) -> None:
        self._options = options
        self._listen = parse_address(options.listen, field="listen")
        self._services = services
        self._also_served = also_served
        self._security = security
        limits = CallLimits(
            options.max_message_bytes, options.max_calls, options.max_held_bytes, options.write_s
        )
        # Each port has separate limits.
        self._guard, self._health_guard = (
            CallGuard(
                background_methods=background_methods,
                limits=limits,
                metrics=metrics,
                security=security,
                tracing=tracing,
            )
            for _ in range(2)
        )
        self.calls = self._guard.calls
        self.health = Health(services)
        self._health_server: grpc.aio.Server | None = None
        self.grpc: grpc.aio.Server = LastingServer(
            lambda: grpc.aio.server(interceptors=[self._guard], options=options.as_grpc()),
            ConnectionWatch(options.connection_limits()),
        )

    def _add_reflection(self, services: tuple[str, ...]) -> None:
        """Add reflection under both of its names: version 1 has the same messages as v1alpha."""
        names = (*services, reflection.SERVICE_NAME, REFLECTION_V1)
        reflection.enable_server_reflection(names, self.grpc)
        method = grpc.stream_stream_rpc_method_handler(
            reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        self.grpc.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": method}),)
        )

    async def start(self) -> str:
        """Listen and return the address.

        Raises ConfigError naming the address if it cannot be bound.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, self.grpc)
        if self._options.channelz:
            channelz.add_channelz_servicer(self.grpc)
        if self._options.reflection:
            self._add_reflection((*self._services, *self._also_served, health.SERVICE_NAME))
        if self._security.weakness and not self._listen.is_loopback:
            logger.warning("%s is %s", self._listen, self._security.weakness)
        address = await _bind(self.grpc, self._listen, self._security.credentials(), field="listen")
        kept = self._options.connection_limits().kept
        wanted = self._options.max_connections
        if kept < wanted:
            logger.warning(
                "RLIMIT_NOFILE is %d, which allows %d connections and not the %d of "
                "max_connections: raise it to %d",
                raised_file_limit(),
                kept,
                wanted,
                files_for(wanted),
            )
        await self.health.start()
        await self._start_health()
        await self.grpc.start()
        return str(address)

    async def _start_health(self) -> None:
        """Start the health port, which serves only health in plain text."""
        if self._options.health_listen is None:
            return
        listen = parse_address(self._options.health_listen, field="health_listen")
        options = replace(
            self._options,
            max_message_bytes=HEALTH_MESSAGE_BYTES,
            max_streams=HEALTH_CALLS,
            max_connections=HEALTH_CONNECTIONS,
        )
        self._health_server = LastingServer(
            lambda: grpc.aio.server(interceptors=[self._health_guard], options=options.as_grpc()),
            ConnectionWatch(options.connection_limits()),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, self._health_server)
        await _bind(self._health_server, listen, None, field="health_listen")
        await self._health_server.start()

    async def empty(self, *, grace_s: float) -> None:
        """Wait `grace_s` for the open calls, then return the rest to their callers.

        The server continues to run. The services reject new calls themselves.
        """
        if not await self.calls.wait_quiet(timeout_s=grace_s):
            logger.warning(
                "returning calls that are open after the grace period",
                extra={"grace_s": grace_s},
            )
        await self.hand_back(DrainingError("the server is stopping"))

    async def hand_back(self, error: BatonError) -> None:
        """End the open calls with this error, so that their callers continue elsewhere.

        The server continues to run.
        """
        self.calls.hand_back(error)
        await self.calls.wait_quiet(timeout_s=1.0)

    async def drain(self, *, grace_s: float) -> None:
        """Drain the server and stop it.

        Reports NOT_SERVING, rejects new calls, waits `grace_s` for open calls, then ends the rest.
        """
        await self.health.shut_down()
        self.calls.refuse_new("the server is draining")
        if not await self.calls.wait_quiet(timeout_s=grace_s):
            logger.warning(
                "ending calls that are open after the grace period", extra={"grace_s": grace_s}
            )
        # Requests on a shared endless stream (`Decode.Serve`) end before the stream, which carries
        # their statuses.
        await self.hand_back(DrainingError("the server is stopping"))
        self.calls.expel()
        await self.grpc.stop(grace=EXPEL_S)
        await self.stop()

    async def stop(self) -> None:
        """Stop at once and end all calls. Idempotent.

        gRPC reports an error for a server that was started but not stopped.
        """
        for server in (self.grpc, self._health_server):
            if server is not None:
                await server.stop(grace=None)


async def _bind(
    server: grpc.aio.Server,
    listen: Address,
    credentials: grpc.ServerCredentials | None,
    *,
    field: str,
) -> Address:
    """Return the bound address. Raises ConfigError naming the setting if binding fails."""
    try:
        if credentials is None:
            port = server.add_insecure_port(str(listen))
        else:
            port = server.add_secure_port(str(listen), credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        await server.stop(None)
        raise ConfigError(
            f"cannot listen on {listen}: the address is in use or does not belong to this machine",
            field=field,
        )
    return Address(listen.host, port)
