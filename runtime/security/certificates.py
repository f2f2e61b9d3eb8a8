"""TLS certificates of a process, from PEM files that may be replaced while it runs.

store = CertificateStore(TlsFiles(ca=..., cert=..., key=...))    # ConfigError names the invalid
setting store.server_credentials()                # every new handshake uses the files of that time
store.current().channel_credentials()     # see runtime.rpc.redial for channels that outlive the
files
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from runtime.errors import ConfigError
from runtime.security.file_reload import Contents, Watched


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files.

    `ca` is the accepted authority. `cert` (with intermediates) and `key` (not encrypted) identify
    this process. A client that presents a token or no credential needs neither.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, repr=False)
class Certificates:
    """One state of the files. Has no repr, because it contains the private key."""

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
    """Certificates from the newest valid files. Thread-safe."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the files.

        Raises ConfigError naming the setting if a file cannot be read, is not PEM, or the key
        belongs to another certificate.
        """
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
        """Return whether there is a certificate to present, not only an authority to trust."""
        return self._files.cert is not None

    def current(self) -> Certificates:
        """Return the current certificates: the same object until the files change."""
        return self._watched.current()

    def server_credentials(self, *, require_client_certificate: bool) -> grpc.ServerCredentials:
        """Return credentials that check the files before every handshake."""
        if self._files.cert is None:
            raise ConfigError("tls_cert is missing: a server needs it", field="tls_cert")
        used = self.current()

        def newer() -> grpc.ServerCertificateConfiguration | None:  # gRPC's threads call it
            nonlocal used
            found = self.current()
            if found is used:
                return None
            used = found
            return found.server_configuration(with_ca=require_client_certificate)

        return grpc.dynamic_ssl_server_credentials(
            used.server_configuration(with_ca=require_client_certificate),
            newer,  # type: ignore[arg-type]  # the stubs lack None, which means no change
            require_client_certificate,
        )

    def _make(self, contents: Contents) -> Certificates:
        """Check the files with OpenSSL, because gRPC does not report why a file is invalid."""
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
        # Bundles have comments in any language between their certificates, which are ASCII.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=pem.decode("ascii", errors="ignore")
        )
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{setting}: no PEM certificates: {error}", field=setting) from error
