"""All dashboards."""

from collections.abc import Sequence

from tools.panels.adapters import ADAPTERS
from tools.panels.caches import CACHE
from tools.panels.handoffs import HANDOFF
from tools.panels.overview import OVERVIEW
from tools.panels.pools import DECODE, PREFILL
from tools.panels.queries import Dashboard
from tools.panels.router import ROUTER
from tools.panels.speculation import SPECULATION

WIDTH = 8  # three panels side by side

DASHBOARDS: Sequence[Dashboard] = (
    OVERVIEW,
    PREFILL,
    DECODE,
    HANDOFF,
    SPECULATION,
    CACHE,
    ADAPTERS,
    ROUTER,
)
