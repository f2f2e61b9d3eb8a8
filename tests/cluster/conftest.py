"""The checkpoint that is served here, and its right answers."""

from tests.support.cluster.reference import checkpoint, reference

__all__ = ["checkpoint", "reference"]
