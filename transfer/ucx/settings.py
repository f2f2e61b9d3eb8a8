"""How UCX is set up: three profiles, tried out, and what each turned out to be; and one for GPUs,
not tried out.

Common to all. Endpoint error handling is always on (without it some requests to a dead peer never
end). A keepalive of one second makes shared memory detect a killed process within about one second
(the default is twenty); a stopped one is not detected, there the connection has to be cut. UCX's
ports have no authentication, and over TCP a peer names the address it writes to: only the pools may
be able to reach them.
"""

import logging
import os
import re
import threading
from concurrent.futures import Future
from enum import StrEnum

from runtime.errors import ConfigError
from transfer.ucx.api import UcxContext, UcxEndpoint, UcxLibrary, UcxWorker
from transfer.ucx.binding import UcxBinding, no_free_port

logger = logging.getLogger(__name__)

_COMMON = {
    "KEEPALIVE_INTERVAL": "1s",
    "TCP_CONN_NB": "y",  # else a connect waits in the kernel, for minutes where packets are lost
    "TCP_TX_SEG_SIZE": "1m",
    "TCP_RX_SEG_SIZE": "1m",
    "POSIX_ERROR_HANDLING": "y",
}
RENDEZVOUS_BYTES = 8192
HANDOFF_OPTIONS = {"RNDV_THRESH": str(RENDEZVOUS_BYTES), "MAX_RNDV_RAILS": "1"}
"""Rendezvous for all but the smallest items: the source's bytes go straight to where they
belong."""
STAGE_CHANNEL_OPTIONS = {"RNDV_THRESH": "inf", "POSIX_FIFO_SIZE": "512"}
"""Never rendezvous (it needs the sender's thread while it computes), and room for a few MiB on
their way."""
OPEN_WORKER_S = 10.0
_CLOSE_PERIOD_NS = 100_000_000
_CLOSE_ATTEMPTS = 20
_SLOW_TRANSPORTS = frozenset({"tcp", "self"})
_DEVICE_TRANSPORTS = frozenset({"cuda_copy", "cuda_ipc"})
_RESOURCE = re.compile(r"flags \S+ (\w+)/(\S+)")


class TransportProfile(StrEnum):
    """AUTO uses shared memory on one host and TCP between hosts, unless the operator has set
    UCX_TLS. CUDA adds what moves a device's memory without the host, between processes on one host
    by cuda_ipc."""

    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"
    CUDA = "cuda"

    @property
    def reaches_devices(self) -> bool:
        """Whether messages may be in a CUDA device's memory."""
        return self is TransportProfile.CUDA


def ucx_options(profile: TransportProfile) -> dict[str, str]:
    """UCX options by name without the UCX_ prefix."""
    if profile is TransportProfile.TCP:
        return {**_COMMON, "TLS": "tcp"}
    if profile is TransportProfile.AUTO and "UCX_TLS" in os.environ:
        return dict(_COMMON)
    return {
        **_COMMON,
        "TLS": "posix,tcp,cuda_copy,cuda_ipc" if profile.reaches_devices else "posix,tcp",
    }


def create_worker(
    ucx: UcxLibrary,
    profile: TransportProfile,
    purpose: str,
    options: dict[str, str],
    binding: UcxBinding,
) -> tuple[UcxContext, UcxWorker]:
    """A UCX context and worker that can sleep. Logs which transports are live, and warns when only
    slow ones are.

    Raises:
        ConfigError: UCX cannot work with these transports, devices or ports on this machine.
    """
    binding.check()
    try:
        context = ucx.context({**ucx_options(profile), **options, **binding.options})
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
    except (
        ucx.error
    ) as error:  # of /dev/shm that cannot be written, for one: what UCX logged has the cause
        raise ConfigError(
            f"UCX cannot open its transports ({listing}): {error}", field="transport"
        ) from error


def _open_worker(ucx: UcxLibrary, context: UcxContext, binding: UcxBinding) -> UcxWorker:
    """Where ports are given, in a thread that can be left behind: another process may have taken
    the last free one since they were checked, and UCX then searches until one is free again.
    Workers may be used from any thread."""
    if binding.ports is None:
        return ucx.worker(context)
    made: Future[UcxWorker] = Future()

    def make() -> None:
        try:
            made.set_result(ucx.worker(context))
        except Exception as error:  # noqa: BLE001 - the waiter gets it
            made.set_exception(error)

    threading.Thread(target=make, name="ucx-worker", daemon=True).start()
    try:
        return made.result(OPEN_WORKER_S)
    except (TimeoutError, ucx.error) as error:
        raise no_free_port(binding.ports) from error


def live_devices(context_info: str) -> list[tuple[str, str]]:
    """(transport, device) pairs in UCX's description of a context."""
    return [(match[1], match[2]) for match in _RESOURCE.finditer(context_info)]


def close_endpoint(endpoint: UcxEndpoint) -> None:
    """Force an endpoint closed: its outstanding requests end, and late bytes have nowhere to go."""
    endpoint.close_blocking(_CLOSE_PERIOD_NS, _CLOSE_ATTEMPTS)
