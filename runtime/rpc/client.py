"""Channels to other Baton processes, which detect a dead or silent peer within five seconds.

open_channel("HOST:PORT") -> grpc.aio.Channel           open_sync_channel(...) -> grpc.Channel await
wait_serving(channel, "baton.v1.Prefill", timeout_s=10)
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime.config import parse_address, parse_peer
from runtime.errors import UnavailableError
from runtime.rpc.redial import RedialingChannel, RedialingSyncChannel
from runtime.rpc.unreachable import reach_problem
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity

# Pause between two DNS lookups of a name. gRPC's default of 30 s would hide a moved peer that long.
_LOOK_UP_MS = 500


@dataclass(frozen=True)
class ChannelOptions:
    """Options of a channel.

    The kernel of a killed peer closes its connections at once. A silent peer counts as lost after
    the sum of the two keepalive times. `connect_s` limits connecting to one address, including the
    handshake.
    """

    keepalive_s: float = 1.5
    keepalive_timeout_s: float = 2.5
    connect_s: float = 2.0
    max_reconnect_backoff_s: float = 1.0
    max_message_bytes: int = 64 << 20

    def as_grpc(self) -> list[tuple[str, Any]]:
        return [
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            # Without this option a silent peer is kept for a minute: a bandwidth probe in flight
            # replaces the keepalive ping, and only the probe's timeout counts.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # Despite its name this is the shortest time limit of a connection attempt, not a pause
            # between two attempts.
            ("grpc.min_reconnect_backoff_ms", round(self.connect_s * 1e3)),
            ("grpc.max_reconnect_backoff_ms", round(self.max_reconnect_backoff_s * 1e3)),
            ("grpc.dns_min_time_between_resolutions_ms", _LOOK_UP_MS),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            # the server's error names the field and the limit
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # two channels to one peer fail independently
            ("grpc.enable_http_proxy", 0),
        ]


def open_channel(
    address: str,
    options: ChannelOptions = ChannelOptions(),
    *,
    security: ChannelSecurity = PLAIN_CHANNEL,
) -> grpc.aio.Channel:
    """Return an asyncio channel, which connects on first use.

    If the address is a name, the peer may move to another address.

    Raises:
        ConfigError: the address is not HOST:PORT, or a token would be sent in plain text.
    """
    target, arguments = _target(address, options, security)
    is_named = parse_address(address).is_name
    if security.is_plain and not is_named:
        return grpc.aio.insecure_channel(target, arguments)

    def dial(credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(target, arguments)
        return grpc.aio.secure_channel(target, credentials, arguments)

    return RedialingChannel(security, dial, is_named=is_named)


def open_sync_channel(
    address: str,
    options: ChannelOptions = ChannelOptions(),
    *,
    security: ChannelSecurity = PLAIN_CHANNEL,
) -> grpc.Channel:
    """Return a synchronous channel, for code without an event loop."""
    target, arguments = _target(address, options, security)
    is_named = parse_address(address).is_name
    if security.is_plain and not is_named:
        return grpc.insecure_channel(target, arguments)

    def dial(credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
        if credentials is None:
            return grpc.insecure_channel(target, arguments)
        return grpc.secure_channel(target, credentials, arguments)

    return RedialingSyncChannel(security, dial, is_named=is_named)


def _target(
    address: str, options: ChannelOptions, security: ChannelSecurity
) -> tuple[str, list[tuple[str, Any]]]:
    target = str(parse_peer(address))
    arguments = options.as_grpc()
    security.check_target(target)
    if security.server_name and security.certificates is not None:
        arguments = [*arguments, ("grpc.ssl_target_name_override", security.server_name)]
    return target, arguments


async def wait_serving(channel: grpc.aio.Channel, service: str, *, timeout_s: float) -> None:
    """Wait until the peer's health is SERVING for `service`.

    Raises:
        UnavailableError: it was not within `timeout_s`; the message has the last state.
    """
    last = "no connection"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    call = health_pb2_grpc.HealthStub(channel).Watch(  # type: ignore[attr-defined]  # stubs lack it
                        health_pb2.HealthCheckRequest(service=service)
                    )
                    async for answer in call:
                        last = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            call.cancel()
                            return
                except grpc.aio.AioRpcError as error:
                    last = reach_problem(error.details() or error.code().name)
                    await asyncio.sleep(0.1)
    except TimeoutError:
        raise UnavailableError(f"{service} is not serving after {timeout_s:g} s: {last}") from None
