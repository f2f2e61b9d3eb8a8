"""A certificate authority for tests: issues what a role needs, and what must be refused."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from runtime.security.certificates import CertificateStore, TlsFiles

DAY = timedelta(days=1)
LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


@dataclass(frozen=True)
class Issued:
    """A certificate with its key, in PEM."""

    certificate: bytes
    key: bytes
    serial_number: int


class Authority:
    """Signs with a key of its own."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = (
            _builder(self._name, self._name, self._key, lifetime=(-DAY, DAY))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, *names: str, lifetime: tuple[timedelta, timedelta] = (-DAY, DAY)) -> Issued:
        """Issue a certificate for DNS names, and URIs if a name has `://`; valid for connections to
        127.0.0.1, too."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
        alternative = [
            x509.UniformResourceIdentifier(name) if "://" in name else x509.DNSName(name)
            for name in names
        ]
        certificate = (
            _builder(subject, self._name, key, lifetime=lifetime)
            .add_extension(x509.SubjectAlternativeName([*alternative, LOOPBACK]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Issued(
            certificate.public_bytes(serialization.Encoding.PEM), pem, certificate.serial_number
        )

    def files(self, folder: Path, *names: str, **options: tuple[timedelta, timedelta]) -> TlsFiles:
        """Write the files of a process with the certificate of `names`."""
        return write(folder, self.pem, self.issue(*names, **options))

    def store(
        self, folder: Path, *names: str, **options: tuple[timedelta, timedelta]
    ) -> CertificateStore:
        return CertificateStore(self.files(folder, *names, **options))


def write(folder: Path, ca: bytes, issued: Issued) -> TlsFiles:
    """Write the three files, or replace them one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    files = TlsFiles(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    assert files.cert is not None
    assert files.key is not None
    for path, content in (
        (files.ca, ca),
        (files.cert, issued.certificate),
        (files.key, issued.key),
    ):
        path.write_bytes(content)
    return files


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    lifetime: tuple[timedelta, timedelta],
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + lifetime[0])
        .not_valid_after(now + lifetime[1])
    )
