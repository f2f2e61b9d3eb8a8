"""UCX settings: three tested profiles, and one for GPUs that is not tested.

Common to all profiles: endpoint error handling is always on, because without it some requests to a
dead peer never end. A keepalive of one second makes shared memory detect a killed process within
about one second (the default is twenty). It does not detect a stopped process, whose connection
must be cut. UCX's ports have no authentication, and over TCP a peer names the address to which it
writes. So the network must make these ports reachable only from the pools.
"""

import logging
import os
import re
import threading
from concurrent.futures import Future
from enum import StrEnum

from runtime.errors import ConfigError
from transfer.transport.binding import NetworkBinding, no_free_port
from transfer.ucx.api import UcxContext, UcxEndpoint, UcxLibrary, UcxWorker

logger = logging.getLogger(__name__)

_COMMON = {
    "KEEPALIVE_INTERVAL": "1s",
    "TCP_CONN_NB": "y",  # otherwise a connect blocks in the kernel, for minutes if packets are lost
    "TCP_TX_SEG_SIZE": "1m",
    "TCP_RX_SEG_SIZE": "1m",
    "POSIX_ERROR_HANDLING": "y",
}
RENDEZVOUS_BYTES = 8192
HANDOFF_OPTIONS = {"RNDV_THRESH": str(RENDEZVOUS_BYTES), "MAX_RNDV_RAILS": "1"}
"""Rendezvous for all except the smallest items: the bytes go directly from source to destination.
"""
STAGE_CHANNEL_OPTIONS = {"RNDV_THRESH": "inf", "POSIX_FIFO_SIZE": "512"}
"""No rendezvous (it needs the sender's thread while it computes), and room for a few MiB in flight.
"""
OPEN_WORKER_S = 10.0
_CLOSE_PERIOD_NS = 100_000_000
_CLOSE_ATTEMPTS = 20
_SLOW_TRANSPORTS = frozenset({"tcp", "self"})
_DEVICE_TRANSPORTS = frozenset({"cuda_copy", "cuda_ipc"})
_RESOURCE = re.compile(r"flags \S+ (\w+)/(\S+)")


class TransportProfile(StrEnum):
    """Set of UCX transports.

    AUTO uses shared memory on one host and TCP between hosts, unless the operator has set UCX_TLS.
    CUDA adds transports that move device memory without the host, by cuda_ipc between processes on
    one host.
    """

    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"
    CUDA = "cuda"

    @property
    def reaches_devices(self) -> bool:
        """Return whether messages may be in the memory of a CUDA device."""
        return self is TransportProfile.CUDA


def ucx_options(profile: TransportProfile) -> dict[str, str]:
    """Return UCX options by name without the UCX_ prefix."""
    if profile is TransportProfile.TCP:
        return {**_COMMON, "TLS": "tcp"}
    if profile is TransportProfile.AUTO and "UCX_TLS" in os.environ:
        return dict(_COMMON)
    return {
        **_COMMON,
        "TLS": "posix,tcp,cuda_copy,cuda_ipc" if profile.reaches_devices else "posix,tcp",
    }


def binding_options(binding: NetworkBinding) -> dict[str, str]:
    """Return UCX options by name without the UCX_ prefix; they override the environment."""
    options = {"NET_DEVICES": ",".join(binding.devices)} if binding.devices else {}
    if binding.ports is not None:
        options["TCP_PORT_RANGE"] = "{}-{}".format(*binding.ports)
    return options


def create_worker(
    ucx: UcxLibrary,
    profile: TransportProfile,
    purpose: str,
    options: dict[str, str],
    binding: NetworkBinding,
) -> tuple[UcxContext, UcxWorker]:
    """Create a UCX context and a worker that can sleep.

    Logs the live transports, and warns if only slow ones are live.

    Raises:
        ConfigError: UCX cannot work with these transports, devices or ports on this machine.
    """
    binding.check()
    try:
        context = ucx.context({**ucx_options(profile), **options, **binding_options(binding)})
    except ucx.error as error:
        raise ConfigError(
            f"UCX has no transport for profile {profile.value!r} here: {error}", field="transport"
        ) from error
    devices = live_devices(context.info)
    names = {transport for transport, _ in devices}
    if profile.reaches_devices and not names >= _DEVICE_TRANSPORTS:
        raise ConfigError(
            f"UCX does not reach CUDA devices here: of {', '.join(sorted(_DEVICE_TRANSPORTS))} it has "
            f"{', '.join(sorted(names & _DEVICE_TRANSPORTS)) or 'neither'}",
            field="transport",
        )
    listing = " ".join(sorted(f"{transport}/{device}" for transport, device in devices))
    if {transport for transport, _ in devices} <= _SLOW_TRANSPORTS:
        logger.warning("%s: UCX has no transport faster than TCP here (%s)", purpose, listing)
    else:
        logger.info("%s: UCX transports %s", purpose, listing)
    try:
        return context, _open_worker(ucx, context, binding)
    # One cause is that /dev/shm is not writable; UCX's own log has the cause.
    except ucx.error as error:
        raise ConfigError(
            f"UCX cannot open its transports ({listing}): {error}", field="transport"
        ) from error


def _open_worker(ucx: UcxLibrary, context: UcxContext, binding: NetworkBinding) -> UcxWorker:
    """Open a worker, with given ports in a thread that can be abandoned.

    Another process may have taken the last free port since the check, and UCX then searches until
    one becomes free. Workers may be used from any thread.
    """
    if binding.ports is None:
        return ucx.worker(context)
    made: Future[UcxWorker] = Future()

    def make() -> None:
        try:
            made.set_result(ucx.worker(context))
        except Exception as error:  # noqa: BLE001 (the waiter raises it)
            made.set_exception(error)

    threading.Thread(target=make, name="ucx-worker", daemon=True).start()
    try:
        return made.result(OPEN_WORKER_S)
    except (TimeoutError, ucx.error) as error:
        raise no_free_port(binding.ports) from error


def live_devices(context_info: str) -> list[tuple[str, str]]:
    """Return the (transport, device) pairs in UCX's description of a context."""
    return [(match[1], match[2]) for match in _RESOURCE.finditer(context_info)]


def close_endpoint(endpoint: UcxEndpoint) -> None:
    """Force an endpoint closed: its pending requests end, and late bytes are dropped."""
    endpoint.close_blocking(_CLOSE_PERIOD_NS, _CLOSE_ATTEMPTS)
