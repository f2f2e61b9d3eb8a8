"""What a process asks of those who call it, and what it shows to those it calls: the one place that builds credentials.

    class PrefillConfig(TlsConfig): ...                  settings tls_cert, tls_key, tls_ca
    tls = config.certificates()                          None: plain text
    GrpcServer(..., security=ServerSecurity(tls, pool=PeerRole.PREFILL))
    open_channel(address, security=ChannelSecurity(tls).to(PeerRole.DECODE))

Between roles a certificate is checked for the role's name, not for the address: workers come and go under addresses
that nobody can put into a certificate beforehand.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
from pydantic import Field

from runtime.access import ANYBODY, Access, Caller, PeerRole, access_to, certified, check_role, roles_of
from runtime.certificates import CertificateStore, TlsFiles
from runtime.config import AddressField, Config, parse_address
from runtime.errors import ConfigError
from runtime.tokens import AUTHORIZATION_KEY, OwnToken, TokenList

Context = grpc.aio.ServicerContext[Any, Any]


class ClientCertificates(StrEnum):
    """Whether a TLS server wants to see one."""

    REQUIRED = "required"
    NONE = "none"


class TlsConfig(Config):
    """Settings of every process that listens and calls others: all three files, or plain text."""

    health_listen: AddressField | None = Field(
        default=None, description="HOST:PORT that serves health alone, in plain text, for probes without TLS")
    tls_cert: Path | None = Field(default=None, description="PEM certificate of this process; its DNS name is its role")
    tls_key: Path | None = Field(default=None, description="PEM key of --tls-cert, not encrypted")
    tls_ca: Path | None = Field(default=None, description="PEM certificates of the authority of all roles")

    def certificates(self) -> CertificateStore | None:
        """None without any of the files. Raises ConfigError when some are missing or cannot be used."""
        files = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        missing = [name for name, path in files.items() if path is None]
        if len(missing) == len(files):
            return None
        if missing:
            raise ConfigError(f"{missing[0]} is missing: TLS between roles needs tls_cert, tls_key and tls_ca",
                              field=missing[0])
        return CertificateStore(TlsFiles(files["tls_ca"], files["tls_cert"], files["tls_key"]))


@dataclass(frozen=True)
class ServerSecurity:
    """`pool` is the role whose stages may join, `tokens` what clients of the public API must show."""

    certificates: CertificateStore | None = None
    client_certificates: ClientCertificates = ClientCertificates.REQUIRED
    tokens: TokenList | None = None
    pool: PeerRole | None = None

    @property
    def weakness(self) -> str:
        """What an operator of a server beyond loopback has to know; empty if nothing."""
        has_names = self.certificates is not None and self.client_certificates is ClientCertificates.REQUIRED
        if not has_names and self.tokens is None:
            return "open to everybody who can reach it: no certificates and no tokens are asked for"
        if self.certificates is None:
            return "asking for tokens in plain text: everybody on the way can read them"
        return ""

    def credentials(self) -> grpc.ServerCredentials | None:
        """None: plain text."""
        if self.certificates is None:
            return None
        required = self.client_certificates is ClientCertificates.REQUIRED
        return self.certificates.server_credentials(require_client_certificate=required)

    def check(self, method: str, context: Context) -> None:
        """Raises UnauthenticatedError or PermissionDeniedError for a caller who may not call `method`."""
        access = access_to(method)
        if access is Access.CLIENT:
            if self.tokens is not None:
                self.tokens.check(_authorization(context))
        elif access is not Access.OPEN and (self.certificates is not None or self.tokens is not None):
            check_role(method, roles_of(context.auth_context()), pool=self.pool)

    def caller(self, context: Context) -> Caller:
        """Who calls a method for clients, after `check`: the holder of a token, else of a certificate, else anybody."""
        if self.tokens is not None:
            name = self.tokens.check(_authorization(context))
            return Caller(f"token:{name}", frozenset({name}))
        return ANYBODY if self.certificates is None else certified(context.auth_context())


def _authorization(context: Context) -> str | None:
    authorization = dict(context.invocation_metadata() or ()).get(AUTHORIZATION_KEY)
    return authorization if isinstance(authorization, str) else None


@dataclass(frozen=True)
class ChannelSecurity:
    """What a caller shows, and whom it believes. `server_name` is the DNS name the server's certificate must have;
    empty: the host of the address."""

    certificates: CertificateStore | None = None
    token: OwnToken | None = None
    server_name: str = ""

    @property
    def is_plain(self) -> bool:
        return self.certificates is None and self.token is None

    def to(self, role: PeerRole) -> "ChannelSecurity":
        """For a channel to a server that must hold this role."""
        return replace(self, server_name=role.value)

    def check_target(self, address: str) -> None:
        """Raises ConfigError when the token would be readable on the network."""
        if self.token is not None and self.certificates is None and not parse_address(address).is_loopback:
            raise ConfigError(f"token_file: the token would travel to {address} in plain text; give --tls-ca",
                              field="token_file")


def client_security(*, tls_ca: Path | None = None, tls_cert: Path | None = None, tls_key: Path | None = None,
                    token_file: Path | None = None, server_name: str = "") -> ChannelSecurity:
    """What a client of the public API was given; `tls_ca` turns TLS on. Raises ConfigError naming the file that is
    missing or cannot be used."""
    if tls_ca is None and (tls_cert is not None or tls_key is not None):
        raise ConfigError("tls_ca is missing: it says which servers to believe", field="tls_ca")
    certificates = None if tls_ca is None else CertificateStore(TlsFiles(tls_ca, tls_cert, tls_key))
    return ChannelSecurity(certificates, None if token_file is None else OwnToken(token_file), server_name)


OPEN_SERVER = ServerSecurity()
PLAIN_CHANNEL = ChannelSecurity()
