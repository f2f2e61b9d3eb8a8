"""Certificates, tokens, and which caller may call which method."""

from runtime.security.access import client_security

__all__ = ["client_security"]
