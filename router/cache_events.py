"""The events of the caches that a router knows of, and their publication by its settings."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from router.api.kv_events import CacheEvents
from router.config import RouterConfig
from router.workers.prefix_index import PrefixIndex
from runtime.errors import ConfigError

logger = logging.getLogger(__name__)


def followed_events(config: RouterConfig, index: PrefixIndex) -> CacheEvents:
    """Return the events of an index, which are followed if any API sends them."""
    events = CacheEvents(index.is_held)
    if config.vllm_engine or config.kv_events:
        index.listener = events
    return events


@asynccontextmanager
async def published_events(
    config: RouterConfig, model: str, events: CacheEvents
) -> AsyncIterator[Callable[[], Coroutine[None, None, None]]]:
    """Yield a function that publishes the events over ZeroMQ until it is cancelled.

    Raises:
        ConfigError: an address cannot be used, or the package is not installed.
    """
    if not config.kv_events:
        yield _publish_nothing
        return
    try:
        from router.api.zmq_events import ZmqEvents
    except ImportError as error:
        raise ConfigError(
            f"kv_events needs the package pyzmq: pip install 'baton[zmq]' ({error})",
            field="kv_events",
        ) from error
    topic = config.kv_events_topic or f"kv@{socket.gethostname()}@{model}"
    publisher = ZmqEvents(events, topic, config.kv_events, config.kv_events_replay)
    addresses = ", ".join(publisher.addresses)
    logger.info("cache events are published", extra={"address": addresses, "topic": topic})
    try:
        yield publisher.run
    finally:
        publisher.close()


async def _publish_nothing() -> None:
    await asyncio.Event().wait()
