"""Structured concurrency with plain errors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from runtime.errors import BatonError


@asynccontextmanager
async def task_scope() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first BatonError comes out as itself instead of inside a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        known = failures.subgroup(BatonError)
        raise (_first_leaf(failures) if known is None else _first_leaf(known)) from None


def _first_leaf(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
