"""A request in admission: when it arrives, while it is queued, and once it is placed."""

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from router.request.demand import Demand
from router.request.service_times import Rates, TokenWork
from router.request.validate import AdmissibleRequest
from router.workers.placement_request import WorkerPair


@dataclass(frozen=True)
class AdmissionTicket:
    """A request with its demand, and the rates of the workers when it arrived."""

    request: AdmissibleRequest
    demand: Demand
    rates: Rates


@dataclass(frozen=True)
class Placed:
    """A pair of workers that is booked for a request, and how long serving it is to take.

    `charged` are the tokens that its client was charged on arrival.
    """

    pair: WorkerPair
    service_s: float
    charged: TokenWork


@dataclass
class QueuedRequest:
    """A queued request, and the future that its task awaits.

    `num_cached` maps the address of a prefill worker to the number of prompt tokens cached there, as
    of `looked_s`.
    """

    request: AdmissibleRequest
    placed: "asyncio.Future[Placed]"
    num_cached: Mapping[str, int] = field(default_factory=dict)
    most_cached: int = 0
    looked_s: float = -math.inf

    def gain(self, sources: Iterable[str]) -> int:
        """Return the tokens cached on the best of `sources`, less those that only other workers
        have.

        The latter would be computed once more on `sources`.
        """
        here = max((self.num_cached.get(address, 0) for address in sources), default=0)
        return here - (self.most_cached - here)
