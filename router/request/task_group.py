"""Structured concurrency with plain errors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from runtime.errors import BatonError
from runtime.supervision import first_leaf


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first BatonError comes out as itself instead of inside a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        known = failures.subgroup(BatonError)
        raise first_leaf(failures if known is None else known) from None
