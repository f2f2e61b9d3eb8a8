"""The checkpoint served here and its expected output."""

from tests.support.cluster.reference import checkpoint, reference

__all__ = ["checkpoint", "reference"]
