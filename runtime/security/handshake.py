"""The check of a TLS handshake that failed, which gRPC does not report.

gRPC ends a call over a rejected connection with "Socket closed" or a message of its TLS library. Here
the handshake is repeated with the same files, only to name the check for a message.
"""

import socket
import ssl
from enum import Enum, auto

from runtime.config import Address
from runtime.security.certificates import TlsFiles

HANDSHAKE_S = 2.0


class Handshake(Enum):
    """Result of a handshake."""

    NO_ANSWER = auto()
    PLAIN = auto()  # the server does not speak TLS
    COMPLETE = auto()
    SERVER_UNTRUSTED = auto()
    CLIENT_CERTIFICATE_MISSING = auto()
    CLIENT_REFUSED = auto()


def try_handshake(
    address: Address, files: TlsFiles | None, server_name: str
) -> tuple[Handshake, str]:
    """Return the result of one handshake, and the reason of a rejected certificate or "".

    Without `files` the server's certificate is not checked, and no own one presented. What the server
    sends is not trusted and used for messages only. `server_name` is the name that the server's
    certificate must have; if empty, the host of the address. Takes up to twice `HANDSHAKE_S`.
    """
    context = ssl.create_default_context(cafile=None if files is None else files.ca)
    if files is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif files.cert is not None:
        context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((address.host, address.port), HANDSHAKE_S) as plain:
            return _shaken(context, plain, server_name or address.host, files)
    except OSError:
        return Handshake.NO_ANSWER, ""


def _shaken(
    context: ssl.SSLContext, plain: socket.socket, name: str, files: TlsFiles | None
) -> tuple[Handshake, str]:
    """Return the result of a handshake and of the first read.

    In TLS 1.3 a client's handshake ends before the server has checked the client's certificate. A
    refusal arrives on the first read, as an alert or, from gRPC, as the end of the connection. A
    server that accepts sends its HTTP/2 settings.
    """
    has_shaken = False
    try:
        with context.wrap_socket(plain, server_hostname=name) as connection:
            has_shaken = True
            if not connection.recv(1):
                return _closed(files)
    except ssl.SSLCertVerificationError as error:
        return Handshake.SERVER_UNTRUSTED, error.verify_message
    except ssl.SSLError as error:
        alert = (error.reason or "").partition("ALERT_")[2].replace("_", " ").lower()
        return _closed(files, alert) if alert else (Handshake.PLAIN, "")
    except ConnectionError:
        return _closed(files) if has_shaken else (Handshake.PLAIN, "")
    except TimeoutError:
        return Handshake.COMPLETE if has_shaken else Handshake.PLAIN, ""
    return Handshake.COMPLETE, ""


def _closed(
    files: TlsFiles | None, alert: str = "probably expired or of another authority"
) -> tuple[Handshake, str]:
    """Return why a server ended the connection after it received this side's certificate, or none."""
    if files is None or files.cert is None:
        return Handshake.CLIENT_CERTIFICATE_MISSING, ""
    return Handshake.CLIENT_REFUSED, alert
