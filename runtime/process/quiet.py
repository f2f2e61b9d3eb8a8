"""Log output of gRPC's C core.

quiet_grpc()                                             before the first import of grpc, which
reads the setting
"""

import os


def quiet_grpc() -> None:
    """Silence the log lines of gRPC's C core.

    It writes to stderr past Python's logging, in its own format, which corrupts a stream of JSON
    lines. Every problem of a call is in its status anyway. `GRPC_VERBOSITY` in the environment
    overrides this.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
