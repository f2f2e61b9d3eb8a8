"""Limits of the sessions that routers name to workers."""

DIGEST_BYTES = 16  # of the names of sessions and clients
MAX_RETENTION_S = 3600.0
