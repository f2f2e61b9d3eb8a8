"""`baton plan`: a search for the cheapest fleet that meets a service level, by simulation."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Annotated

import typer

from baton.finite import finite
from baton.load import Slo
from baton.workload import Planned
from runtime.errors import ConfigError
from sim.command import (
    LoadFlags,
    RoutersFlag,
    one_line_errors,
    parse_slo,
    run_program,
    with_load_flags,
)
from sim.fleet import FleetConfig, simulate
from sim.router import RouterOptions

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

# Multiples of the given load that are compared as long as disaggregation pays, and until it does.
LESS_LOADS = (0.5, 0.25)
MORE_LOADS = (2.0, 4.0)
Attainment = Callable[[int, int], float]
"""Returns the share of requests that meet the SLO, for given numbers of prefill and decode workers.
"""


@dataclass(frozen=True)
class Prices:
    """Price of a worker of each role and of both, and the maximum number of workers of a role."""

    prefill: float = 1.0
    decode: float = 1.0
    most: int = 64
    both: float = 1.0


@dataclass
class FleetSearch:
    """Search for the cheapest fleet. Simulates no fleet twice.

    Relies on monotonicity: an additional worker of either role never lowers the attainment.
    """

    attainment: Attainment
    wanted: float
    prices: Prices
    tried: dict[tuple[int, int], float] = field(default_factory=dict)

    def cheapest(self) -> tuple[int, int]:
        """Return the cheapest sufficient numbers of prefill and decode workers.

        Raises:
            ConfigError: the largest allowed fleet is not sufficient.
        """
        enough = 1
        while not self.keeps(enough, enough):
            if enough == self.prices.most:
                raise ConfigError(
                    f"{enough} prefill and {enough} decode workers meet the SLO for "
                    f"{self.tried[enough, enough]:.1%} of all requests, {self.wanted:.1%} are required; "
                    "--most allows no more",
                    field="most",
                )
            enough = min(2 * enough, self.prices.most)
        total = self.price(enough, enough)
        most_prefill, most_decode = (
            min(self.prices.most, int(total // price))
            for price in (self.prices.prefill, self.prices.decode)
        )
        least_prefill = least(enough, lambda count: self.keeps(count, most_decode))
        least_decode = least(enough, lambda count: self.keeps(most_prefill, count))
        sizes = [
            (prefill, decode)
            for prefill in range(least_prefill, most_prefill + 1)
            for decode in range(least_decode, most_decode + 1)
            if self.price(prefill, decode) <= total
        ]
        sizes.sort(key=lambda size: (self.price(*size), size))
        return next(size for size in sizes if not self._is_too_small(*size) and self.keeps(*size))

    def keeps(self, prefill: int, decode: int) -> bool:
        return self.share(prefill, decode) >= self.wanted

    def share(self, prefill: int, decode: int) -> float:
        """Return the attainment of a fleet; 0 without workers of a role."""
        if not prefill or not decode:
            return 0.0
        if (prefill, decode) not in self.tried:
            self.tried[prefill, decode] = self.attainment(prefill, decode)
        return self.tried[prefill, decode]

    def price(self, prefill: int, decode: int) -> float:
        return prefill * self.prices.prefill + decode * self.prices.decode

    def _is_too_small(self, prefill: int, decode: int) -> bool:
        """Return whether a fleet that is at least as large is known to be insufficient."""
        return any(
            prefill <= source and decode <= pool and share < self.wanted
            for (source, pool), share in self.tried.items()
        )


def least(enough: int, suffices: Callable[[int], bool]) -> int:
    """Return the smallest sufficient count from 1; every count above a sufficient one is
    sufficient.

    `enough` must be sufficient.
    """
    low = 0
    high = enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Cheapest:
    """The cheapest sufficient fleets for one load: numbers of workers, and prices.

    `aggregated_workers` is None if no allowed number of workers of both roles is sufficient, and
    `prefill_workers` 0 if no allowed fleet of prefill and decode workers is.
    """

    prefill_workers: int
    decode_workers: int
    price: float
    aggregated_workers: int | None
    aggregated_price: float

    @property
    def pays(self) -> bool:
        """Return whether disaggregation is cheaper."""
        return self.price < self.aggregated_price


@dataclass(frozen=True)
class FleetPlan:
    """Result of a search.

    Shares are of requests that meet the SLO. `aggregated` is the share for as many workers that
    both prefill and decode. `aggregated_workers` is the number of these that would be sufficient,
    None if twice `Prices.most` are not. `pays_from` is the least of the compared loads for which
    disaggregation is cheaper, as a multiple of the given one; None if it is for none.
    """

    prefill_workers: int
    decode_workers: int
    price: float
    share: float
    share_with_a_prefill_worker_less: float
    share_with_a_decode_worker_less: float
    aggregated: float
    aggregated_workers: int | None
    aggregated_price: float | None
    pays_from: float | None
    fleets_tried: int
    machine_wall_s: float

    def lines(self, slo: Slo) -> Iterator[str]:
        """Yield the result as lines of text."""
        prefill, decode = self.prefill_workers, self.decode_workers
        aggregated = self.aggregated_workers
        price = "-" if self.aggregated_price is None else f"{self.aggregated_price:g}"
        rows = [
            ("fleet", "price", "good requests"),
            (f"disaggregated: {prefill} prefill + {decode} decode", f"{self.price:g}", self.share),
            ("  one prefill worker less", "", self.share_with_a_prefill_worker_less),
            ("  one decode worker less", "", self.share_with_a_decode_worker_less),
            (f"aggregated: {prefill + decode} of both roles", "", self.aggregated),
            (
                "  enough: " + ("no allowed number" if aggregated is None else f"{aggregated}"),
                price,
                "",
            ),
        ]
        for fleet, cost, share in rows:
            shown = f"{share:.1%}" if isinstance(share, float) else share
            yield f"{fleet:40} {cost:>8}  {shown:>13}"
        yield f"good: TTFT <= {slo.ttft_s:g} s and TPOT <= {slo.tpot_s:g} s; price: of all workers"
        yield self.verdict
        yield f"{self.fleets_tried} fleets tried in {self.machine_wall_s:.0f} s"

    @property
    def verdict(self) -> str:
        """Return in one line whether disaggregation pays, and from which load on."""
        if self.pays_from is None:
            return f"disaggregation does not pay for this load, nor for up to {MORE_LOADS[-1]:g} times as much"
        if self.pays_from > 1:
            return f"disaggregation does not pay for this load; it does from {self.pays_from:g} times this load on"
        if self.pays_from > LESS_LOADS[-1]:
            return f"disaggregation pays for this load, from {self.pays_from:g} times it on"
        return f"disaggregation pays for this load, and still for {self.pays_from:g} times it"


class _Planner:
    """The search for fleets, at the given load and at multiples of it."""

    def __init__(
        self, config: FleetConfig, load: list[Planned], slo: Slo, wanted: float, prices: Prices
    ) -> None:
        self._config = config
        self._load = load
        self._slo = slo
        self._wanted = wanted
        self._prices = prices
        self.num_tried = 0
        self.share = cache(self._share)

    def _share(self, prefill: int, decode: int, both: int, times: float = 1.0) -> float:
        """Simulate a fleet under `times` the load; return the share of good requests."""
        fleet = replace(self._config, num_prefill=prefill, num_decode=decode, num_both=both)
        load = [replace(planned, at_s=planned.at_s / times) for planned in self._load]
        share = sum(map(self._slo.is_met, simulate(fleet, load).outcomes)) / len(load)
        self.num_tried += 1
        named = (
            f"aggregated, {both} of both roles"
            if both
            else f"disaggregated, {prefill} prefill + {decode} decode"
        )
        at = "" if times == 1 else f" at {times:g} times the load"
        print(f"tried: {named}: {share:.1%} of requests good{at}", file=sys.stderr)
        return share

    def search(self, times: float = 1.0) -> FleetSearch:
        """Return a search among fleets of prefill and decode workers."""
        return FleetSearch(
            lambda prefill, decode: self.share(prefill, decode, 0, times),
            self._wanted,
            self._prices,
        )

    def num_both(self, times: float = 1.0) -> int | None:
        """Return the sufficient number of workers of both roles; None if no allowed one is."""
        enough, most = 1, 2 * self._prices.most
        while self.share(0, 0, enough, times) < self._wanted:
            if enough == most:
                return None
            enough = min(2 * enough, most)
        return least(enough, lambda count: self.share(0, 0, count, times) >= self._wanted)

    def cheapest(self, times: float) -> Cheapest:
        """Return the cheapest fleets under `times` the load."""
        search = self.search(times)
        try:
            prefill, decode = search.cheapest()
            price = search.price(prefill, decode)
        except ConfigError:
            prefill, decode, price = 0, 0, math.inf
        return self.compared(prefill, decode, price, self.num_both(times))

    def compared(self, prefill: int, decode: int, price: float, num_both: int | None) -> Cheapest:
        """Return both kinds of fleets with their prices."""
        both_price = math.inf if num_both is None else num_both * self._prices.both
        return Cheapest(prefill, decode, price, num_both, both_price)

    def pays_from(self, *, pays: bool) -> float | None:
        """Return the least of the compared loads for which disaggregation pays.

        `pays`: whether it does for the given load.
        """
        if pays:
            paid = 1.0
            for times in LESS_LOADS:
                if not self.cheapest(times).pays:
                    break
                paid = times
            return paid
        return next((times for times in MORE_LOADS if self.cheapest(times).pays), None)


def plan_fleet(
    config: FleetConfig, load: list[Planned], slo: Slo, wanted: float, prices: Prices
) -> FleetPlan:
    """Plan a fleet for this load; print the result of each simulated fleet to stderr.

    Raises:
        ConfigError: no allowed fleet is sufficient.
    """
    began_s = time.perf_counter()
    planner = _Planner(config, load, slo, wanted, prices)
    search = planner.search()
    prefill, decode = search.cheapest()
    found = planner.compared(prefill, decode, search.price(prefill, decode), planner.num_both())
    return FleetPlan(
        prefill,
        decode,
        found.price,
        search.share(prefill, decode),
        search.share(prefill - 1, decode),
        search.share(prefill, decode - 1),
        planner.share(0, 0, prefill + decode),
        found.aggregated_workers,
        None if found.aggregated_workers is None else found.aggregated_price,
        planner.pays_from(pays=found.pays),
        planner.num_tried,
        time.perf_counter() - began_s,
    )


@app.command()
@with_load_flags
def command(
    flags: LoadFlags,
    share: Annotated[
        float,
        typer.Option(
            min=0.01, max=1.0, callback=finite, help="Share of all requests that must meet the SLO."
        ),
    ] = 0.95,
    routers: RoutersFlag = 1,
    most: Annotated[int, typer.Option(min=1, help="Maximum number of workers of one role.")] = 64,
    prefill_price: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Price of a prefill worker, any unit.")
    ] = 1.0,
    decode_price: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Price of a decode worker.")
    ] = 1.0,
    worker_price: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            callback=finite,
            help="Price of a worker of both roles; default: the higher of the other two.",
        ),
    ] = None,
) -> None:
    """Search for the cheapest fleet that serves a load within an SLO, by simulating fleets.

    Also says whether disaggregation pays: whether workers that prefill and decode would cost more.
    """
    with one_line_errors("plan"):
        limits = parse_slo(flags.slo)
        config = FleetConfig(
            num_routers=routers,
            costs=flags.costs_read(),
            router=RouterOptions(flags.policy),
            seed=flags.seed,
        )
        found = plan_fleet(
            config,
            flags.planned(config.costs),
            limits,
            share,
            Prices(
                prefill_price,
                decode_price,
                most,
                worker_price or max(prefill_price, decode_price),
            ),
        )
        print(json.dumps(asdict(found)) if flags.as_json else "\n".join(found.lines(limits)))


if __name__ == "__main__":
    run_program(app, "baton plan")
