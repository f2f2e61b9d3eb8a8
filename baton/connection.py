"""Flags for the connection of every `baton` command, each with an environment variable."""

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from runtime.config import parse_address
from runtime.errors import BatonError, UnauthenticatedError, UnavailableError
from runtime.security.access import ChannelSecurity, client_security

TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="BATON_TLS_CA", help="PEM certificates of the trusted authority; enables TLS."
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        envvar="BATON_TLS_CERT", help="PEM certificate to present if the server requests one."
    ),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="BATON_TLS_KEY", help="PEM key of the certificate.")
]
TlsName = Annotated[
    str,
    typer.Option(
        envvar="BATON_TLS_NAME",
        help="DNS name that the server's certificate must have; default: the host of the target.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="BATON_TOKEN_FILE", help="File with the bearer token to present."),
]


def connection(
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_name: str,
    token_file: Path | None,
) -> ChannelSecurity:
    """Return the security settings of the flags.

    Raises:
        ConfigError: a flag is missing, or its file cannot be used; names the flag.
    """
    return client_security(
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        token_file=token_file,
        server_name=tls_name,
    )


_PROBE_S = 2.0


def advice(
    error: BatonError, targets: Sequence[str], *, tls_ca: Path | None, token_file: Path | None
) -> str:
    """Return advice about an error that looks like a wrong flag or a missing router.

    It begins with "; ", and is empty if there is no advice.
    """
    if isinstance(error, UnauthenticatedError) and token_file is None:
        return "; pass one with --token-file FILE (or BATON_TOKEN_FILE)"
    if not isinstance(error, UnavailableError):
        return ""
    target = targets[0].partition(",")[0].strip()
    speaks_tls = _speaks_tls(target)
    if speaks_tls is None:
        return (
            "; `baton up` starts a cluster, --target HOST:PORT (or BATON_TARGET) selects "
            "another router"
        )
    if speaks_tls and tls_ca is None:
        return f"; {target} uses TLS: pass --tls-ca FILE (or BATON_TLS_CA)"
    if speaks_tls is False and tls_ca is not None:
        return f"; {target} does not use TLS: remove --tls-ca (and BATON_TLS_CA)"
    return ""


def _speaks_tls(target: str) -> bool | None:
    """Return whether the target speaks TLS, or None if it does not respond. Its response is not
    trusted."""
    address = parse_address(target)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((address.host, address.port), _PROBE_S) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=address.host):
                    return True
            except (ssl.SSLError, TimeoutError) as error:
                return isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in str(error)
    except OSError:
        return None
