"""How UCX is set up: three profiles, tried out, and what each turned out to be.

Common to all. Endpoint error handling is always on (without it some requests to a dead peer never end). A keepalive
of one second makes shared memory notice a killed process within about one second (the default is twenty); a stopped one
is noticed by nobody, there the connection has to be cut. UCX's ports know no authentication, and over TCP a peer names
the address it writes to: only the pools may be able to reach them.
"""

import logging
import os
import re
from enum import StrEnum

from runtime.errors import ConfigError
from transfer.ucx_api import UcxContext, UcxEndpoint, UcxLibrary, UcxWorker
from transfer.ucx_binding import UcxBinding

logger = logging.getLogger(__name__)

_COMMON = {
    "KEEPALIVE_INTERVAL": "1s",
    "TCP_TX_SEG_SIZE": "1m",
    "TCP_RX_SEG_SIZE": "1m",
    "POSIX_ERROR_HANDLING": "y",
}
HANDOFF_OPTIONS = {"RNDV_THRESH": "8192", "MAX_RNDV_RAILS": "1"}
"""Rendezvous for all but the smallest items: the source's bytes go straight to where they belong."""
STAGE_CHANNEL_OPTIONS = {"RNDV_THRESH": "inf", "POSIX_FIFO_SIZE": "512"}
"""Never rendezvous (it needs the sender's thread while it computes), and room for a few MiB on their way."""
_CLOSE_PERIOD_NS = 100_000_000
_CLOSE_ATTEMPTS = 20
_SLOW_TRANSPORTS = frozenset({"tcp", "self"})
_RESOURCE = re.compile(r"flags \S+ (\w+)/(\S+)")


class TransportProfile(StrEnum):
    """AUTO uses shared memory on one host and TCP between hosts, unless the operator has set UCX_TLS."""

    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"


def ucx_options(profile: TransportProfile) -> dict[str, str]:
    """UCX options by name without the UCX_ prefix."""
    if profile is TransportProfile.TCP:
        return {**_COMMON, "TLS": "tcp"}
    if profile is TransportProfile.AUTO and "UCX_TLS" in os.environ:
        return dict(_COMMON)
    return {**_COMMON, "TLS": "posix,tcp"}


def create_worker(ucx: UcxLibrary, profile: TransportProfile, purpose: str,
                  options: dict[str, str], binding: UcxBinding) -> tuple[UcxContext, UcxWorker]:
    """A UCX context and worker that can sleep. Logs which transports are live, and warns when only slow ones are.

    Raises:
        ConfigError: UCX cannot work with these transports, devices or ports on this machine.
    """
    binding.check()
    try:
        context = ucx.context({**ucx_options(profile), **options, **binding.options})
    except ucx.error as error:
        raise ConfigError(f"UCX has no transport for profile {profile.value!r} here: {error}",
                          field="transport") from error
    devices = live_devices(context.info)
    listing = " ".join(sorted(f"{transport}/{device}" for transport, device in devices))
    if {transport for transport, _ in devices} <= _SLOW_TRANSPORTS:
        logger.warning("%s: UCX has no transport faster than TCP here (%s)", purpose, listing)
    else:
        logger.info("%s: UCX transports %s", purpose, listing)
    return context, ucx.worker(context)


def live_devices(context_info: str) -> list[tuple[str, str]]:
    """(transport, device) pairs in UCX's description of a context."""
    return [(match[1], match[2]) for match in _RESOURCE.finditer(context_info)]


def close_endpoint(endpoint: UcxEndpoint) -> None:
    """Force an endpoint closed: its outstanding requests end, and late bytes have nowhere to go."""
    endpoint.close_blocking(_CLOSE_PERIOD_NS, _CLOSE_ATTEMPTS)
