"""Certificates, tokens, and access rules by method."""

from runtime.security.access import client_security

__all__ = ["client_security"]
