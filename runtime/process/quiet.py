"""What gRPC's C core writes on its own.

quiet_grpc()                                             before the first import of grpc, which reads the setting
"""

import os


def quiet_grpc() -> None:
    """Its lines go to stderr past Python's logging, in a format of their own: among JSON lines they
    are noise, and whatever a call meets is its status anyway. `GRPC_VERBOSITY` in the environment
    beats this."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
