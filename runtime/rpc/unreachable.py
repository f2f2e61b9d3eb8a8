"""Readable reasons for unreachable peers; gRPC's own texts name its internal components.

reach_problem(rpc_error.details())        # "127.0.0.1:7000: connection refused"
"""

import re
from urllib.parse import unquote

# The last of several attempts: status, address and cause.
_ATTEMPT = re.compile(
    r"failed to connect to all addresses; last error: [A-Z_]+: (?:ipv[46]:)?(\S+): (.*)", re.DOTALL
)
_NAME = re.compile(r"errors resolving (\S+): \[.*: ([^:\]]*)\]", re.DOTALL)
_CAUSES = (
    ("Connection refused", "connection refused"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS, but the call uses TLS"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by an authority in tls_ca"),
    (
        "Hostname Verification Check failed",
        "its certificate has another name than the expected one",
    ),
    (
        "Socket closed",
        "it closes the connection; it may require TLS or another certificate",
    ),
    ("before receiving SETTINGS frame", "it accepts the connection but sends nothing"),
    ("http1.x server", "it speaks HTTP/1, not gRPC"),
)


def reach_problem(details: str | None) -> str:
    """Return the meaning of the `details` of a call that gRPC itself ended.

    Other details are returned unchanged.
    """
    details = details or "no details"
    if (name := _NAME.fullmatch(details)) is not None:
        host = name[1].rpartition(":")[0]
        why = name[2].lower()
        return (
            f"{host} has no address"
            if why == "domain name not found"
            else f"{host} cannot be looked up: {why}"
        )
    if details.startswith("Stream removed"):
        return "its connection has ended"
    attempt = _ATTEMPT.fullmatch(details)
    if attempt is None:
        return details
    address = unquote(attempt[1])
    cause = attempt[2]
    return f"{address}: {next((words for sign, words in _CAUSES if sign in cause), cause)}"
