"""Flags for the connection of every `baton` command, each with an environment variable."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from runtime.config import parse_address
from runtime.errors import BatonError, UnauthenticatedError, UnavailableError
from runtime.security.access import ChannelSecurity, client_security
from runtime.security.certificates import TlsFiles
from runtime.security.handshake import Handshake, try_handshake

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


@dataclass(frozen=True)
class ConnectionFlags:
    """The flags of one command that select credentials."""

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_name: str = ""
    token_file: Path | None = None

    def security(self) -> ChannelSecurity:
        """Return the security settings of the flags.

        Raises:
            ConfigError: a flag is missing, or its file cannot be used; names the flag.
        """
        return client_security(
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            token_file=self.token_file,
            server_name=self.tls_name,
        )

    def advice(self, error: BatonError, targets: Sequence[str]) -> str:
        """Return advice about an error that looks like a wrong flag or a missing router.

        It begins with "; ", and is empty if there is no advice.
        """
        if isinstance(error, UnauthenticatedError) and self.token_file is None:
            return "; pass one with --token-file FILE (or BATON_TOKEN_FILE)"
        if not isinstance(error, UnavailableError):
            return ""
        target = targets[0].partition(",")[0].strip()
        files = None if self.tls_ca is None else TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)
        found, why = try_handshake(parse_address(target), files, self.tls_name)
        if found is Handshake.NO_ANSWER:
            return (
                "; `baton up` starts a cluster, --target HOST:PORT (or BATON_TARGET) selects "
                "another router"
            )
        if found is Handshake.PLAIN:
            if files is None:
                return ""
            return f"; {target} does not use TLS: remove --tls-ca (and BATON_TLS_CA)"
        if files is None:
            return f"; {target} uses TLS: pass --tls-ca FILE (or BATON_TLS_CA)"
        return {
            Handshake.COMPLETE: "",
            Handshake.SERVER_UNTRUSTED: f"; the certificate of {target} was not accepted: {why} "
            f"(--tls-ca, --tls-name)",
            Handshake.CLIENT_CERTIFICATE_MISSING: f"; {target} accepts only clients with a "
            "certificate: pass --tls-cert FILE and --tls-key FILE (or BATON_TLS_CERT, BATON_TLS_KEY)",
            Handshake.CLIENT_REFUSED: f"; {target} did not accept this client's certificate: "
            f"{why} (--tls-cert)",
        }[found]
