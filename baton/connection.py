"""The flags that set how every command of `baton` connects; each has a variable, so that they are
set once."""

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
        envvar="BATON_TLS_CA", help="PEM certificates of the authority to trust; connect by TLS."
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="BATON_TLS_CERT", help="PEM certificate to show, where one is asked for."),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="BATON_TLS_KEY", help="PEM key of the certificate.")
]
TlsName = Annotated[
    str,
    typer.Option(
        envvar="BATON_TLS_NAME",
        help="DNS name the server's certificate must have; default: the host of the target.",
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option(envvar="BATON_TOKEN_FILE", help="File with the bearer token to show.")
]


def connection(
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_name: str,
    token_file: Path | None,
) -> ChannelSecurity:
    """Raises ConfigError naming the flag that is missing or whose file cannot be used."""
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
    """Return what to do about an error, where it looks like a flag too few or too many, or like no
    router at all; begins with "; ", empty where there is nothing to say."""
    if isinstance(error, UnauthenticatedError) and token_file is None:
        return "; show one with --token-file FILE (or BATON_TOKEN_FILE)"
    if not isinstance(error, UnavailableError):
        return ""
    target = targets[0].partition(",")[0].strip()
    speaks_tls = _speaks_tls(target)
    if speaks_tls is None:
        return "; `baton up` starts a cluster, --target HOST:PORT (or BATON_TARGET) names another router"
    if speaks_tls and tls_ca is None:
        return f"; {target} speaks TLS: give --tls-ca FILE (or BATON_TLS_CA)"
    if speaks_tls is False and tls_ca is not None:
        return f"; {target} does not speak TLS: leave --tls-ca (and BATON_TLS_CA) out"
    return ""


def _speaks_tls(target: str) -> bool | None:
    """None when nothing answers there. What is answered is not trusted."""
    address = parse_address(target)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((address.host, address.port), _PROBE_S) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=address.host):
                    return True
            except (ssl.SSLError, TimeoutError) as error:
                return isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in str(error)
    except OSError:
        return None
