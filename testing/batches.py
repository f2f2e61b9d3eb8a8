"""Batches that run more than once."""

from dataclasses import fields, replace
from typing import Any

from engine.core.batch import FieldRule, ForwardBatch


def unmarked(batch: ForwardBatch) -> ForwardBatch:
    """Return a batch of the same rows without what is dropped with membership, so that another
    backend can plan and run it."""
    dropped: dict[str, Any] = {
        field.name: field.default
        for field in fields(batch)
        if field.metadata["rule"] is FieldRule.DROPPED
    }
    return replace(batch, **dropped)
