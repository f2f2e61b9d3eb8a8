"""`baton plan`: a search for the cheapest fleet that meets a service level, by simulation."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import typer

from baton.finite import finite
from baton.load import Slo
from baton.workload import Planned
from runtime.errors import ConfigError
from sim.aggregated import aggregated
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

Attainment = Callable[[int, int], float]
"""Returns the share of requests that meet the SLO, for given numbers of prefill and decode workers.
"""


@dataclass(frozen=True)
class Prices:
    """Price of a worker of each role, and the maximum number of workers of a role."""

    prefill: float = 1.0
    decode: float = 1.0
    most: int = 64


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
class FleetPlan:
    """Result of a search.

    Shares are of requests that meet the SLO. `aggregated` is the share for as many workers that
    both prefill and decode. `aggregated_workers` is the number of these that would be sufficient,
    None if twice `Prices.most` are not.
    """

    prefill_workers: int
    decode_workers: int
    price: float
    share: float
    share_with_a_prefill_worker_less: float
    share_with_a_decode_worker_less: float
    aggregated: float
    aggregated_workers: int | None
    fleets_tried: int
    machine_wall_s: float

    def lines(self, slo: Slo) -> Iterator[str]:
        """Yield the result as lines of text."""
        size = self.prefill_workers + self.decode_workers
        yield (
            f"{self.prefill_workers} prefill and {self.decode_workers} decode workers, at {self.price:g}: "
            f"{self.share:.1%} of all requests meet TTFT <= {slo.ttft_s:g} s and TPOT <= {slo.tpot_s:g} s"
        )
        yield (
            f"with one prefill worker less {self.share_with_a_prefill_worker_less:.1%}, with one decode worker less "
            f"{self.share_with_a_decode_worker_less:.1%}"
        )
        verdict = "better" if self.aggregated > self.share else "no better"
        yield f"{size} aggregated workers would meet it for {self.aggregated:.1%}, which is {verdict}"
        yield (
            "no allowed number of aggregated workers would be enough"
            if self.aggregated_workers is None
            else f"{self.aggregated_workers} aggregated workers would be enough"
        )
        yield f"{self.fleets_tried} fleets tried in {self.machine_wall_s:.0f} s"


def plan_fleet(
    config: FleetConfig, load: list[Planned], slo: Slo, wanted: float, prices: Prices
) -> FleetPlan:
    """Plan a fleet for this load; print the result of each simulated fleet to stderr.

    Raises:
        ConfigError: no allowed fleet is sufficient.
    """
    began_s = time.perf_counter()

    def attainment(prefill: int, decode: int) -> float:
        run = simulate(replace(config, num_prefill=prefill, num_decode=decode), load)
        share = sum(map(slo.is_met, run.outcomes)) / len(load)
        print(
            f"{prefill} prefill and {decode} decode workers meet the SLO for {share:.1%}",
            file=sys.stderr,
        )
        return share

    def together(count: int) -> float:
        return sum(map(slo.is_met, aggregated(count, config.costs, load))) / len(load)

    search = FleetSearch(attainment, wanted, prices)
    prefill, decode = search.cheapest()
    most = 2 * prices.most
    return FleetPlan(
        prefill,
        decode,
        search.price(prefill, decode),
        search.share(prefill, decode),
        search.share(prefill - 1, decode),
        search.share(prefill, decode - 1),
        together(prefill + decode),
        least(most, lambda count: together(count) >= wanted) if together(most) >= wanted else None,
        len(search.tried),
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
) -> None:
    """Search for the cheapest fleet that serves a load within an SLO, by simulating fleets.

    Also shows the result for as many workers that both prefill and decode.
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
            Prices(prefill_price, decode_price, most),
        )
        print(json.dumps(asdict(found)) if flags.as_json else "\n".join(found.lines(limits)))


if __name__ == "__main__":
    run_program(app, "baton plan")
