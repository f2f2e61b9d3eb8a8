"""Limits of the sessions and clients that routers name to workers."""

DIGEST_BYTES = 16  # of the names of sessions and clients
MAX_RETENTION_S = 3600.0
MIN_WEIGHT, MAX_WEIGHT = 0.01, 1000.0  # of a client
