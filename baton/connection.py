"""The flags by which every command of `baton` says how it connects; each has a variable, so that they are set once."""

from pathlib import Path
from typing import Annotated

import typer

from runtime.security import ChannelSecurity, client_security

TlsCa = Annotated[Path | None, typer.Option(
    envvar="BATON_TLS_CA", help="PEM certificates of the authority to believe; connect by TLS.")]
TlsCert = Annotated[Path | None, typer.Option(
    envvar="BATON_TLS_CERT", help="PEM certificate to show, where one is asked for.")]
TlsKey = Annotated[Path | None, typer.Option(envvar="BATON_TLS_KEY", help="PEM key of the certificate.")]
TlsName = Annotated[str, typer.Option(
    envvar="BATON_TLS_NAME", help="DNS name the server's certificate must have; default: the host of the target.")]
TokenFile = Annotated[Path | None, typer.Option(
    envvar="BATON_TOKEN_FILE", help="File with the bearer token to show.")]


def connection(tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, tls_name: str,
               token_file: Path | None) -> ChannelSecurity:
    """Raises ConfigError naming the flag that is missing or whose file cannot be used."""
    return client_security(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token_file=token_file,
                           server_name=tls_name)
