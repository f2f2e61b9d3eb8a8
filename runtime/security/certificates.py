"""TLS certificates of a process, from PEM files that may be replaced while it runs.

store = CertificateStore(TlsFiles(ca=..., cert=..., key=...))    # ConfigError names the setting that cannot work
store.server_credentials()                # every new connection is shaken with the files as they are then
store.current().channel_credentials()     # see runtime.rpc.redial for channels that outlive the files
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from runtime.errors import ConfigError
from runtime.security.file_reload import Contents, Watched


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. `ca` is the authority this process accepts; `cert` (with intermediates) and `key`
    (not encrypted) show who it is, and may be absent in a client that shows a token or nothing."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, repr=False)
class Certificates:
    """One state of the files. No repr: it holds the private key."""

    ca: bytes
    cert: bytes | None
    key: bytes | None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def server_configuration(self, *, with_ca: bool) -> grpc.ServerCertificateConfiguration:
        assert self.key is not None
        assert self.cert is not None
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.cert)], self.ca if with_ca else None
        )


class CertificateStore:
    """The newest files that work. Any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError naming the setting: a file that cannot be read, is not PEM, or a key
        of another certificate."""
        if (files.cert is None) != (files.key is None):
            missing, given = (
                ("tls_key", "tls_cert") if files.key is None else ("tls_cert", "tls_key")
            )
            raise ConfigError(f"{missing} is missing: {given} was given without it", field=missing)
        self._files = files
        paths = {"tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}
        self._watched = Watched(
            {setting: path for setting, path in paths.items() if path is not None}, self._make
        )

    @property
    def has_own(self) -> bool:
        """Whether there is a certificate to show, not only an authority to trust."""
        return self._files.cert is not None

    def current(self) -> Certificates:
        """The same object until the files change."""
        return self._watched.current()

    def server_credentials(self, *, require_client_certificate: bool) -> grpc.ServerCredentials:
        """Credentials that look at the files before every handshake."""
        if self._files.cert is None:
            raise ConfigError("tls_cert is missing: a server cannot do without", field="tls_cert")
        used = self.current()

        def newer() -> grpc.ServerCertificateConfiguration | None:  # called by gRPC's threads
            nonlocal used
            found = self.current()
            if found is used:
                return None
            used = found
            return found.server_configuration(with_ca=require_client_certificate)

        return grpc.dynamic_ssl_server_credentials(
            used.server_configuration(with_ca=require_client_certificate),
            newer,  # type: ignore[arg-type]  # in the stubs None is missing, which means no change
            require_client_certificate,
        )

    def _make(self, contents: Contents) -> Certificates:
        """Checked by OpenSSL, because gRPC does not report why it cannot use a file."""
        for setting in ("tls_ca", "tls_cert"):
            if setting in contents:
                _check_certificates(setting, contents[setting])
        if self._files.cert is not None and self._files.key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                    self._files.cert, self._files.key, password=lambda: ""
                )
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(
                    f"tls_key: {self._files.key} is not the unencrypted PEM key of {self._files.cert}: "
                    f"{error}",
                    field="tls_key",
                ) from error
        return Certificates(contents["tls_ca"], contents.get("tls_cert"), contents.get("tls_key"))


def _check_certificates(setting: str, pem: bytes) -> None:
    try:
        # Bundles have comments in all languages between their certificates, which are ASCII.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=pem.decode("ascii", errors="ignore")
        )
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{setting}: no PEM certificates: {error}", field=setting) from error
