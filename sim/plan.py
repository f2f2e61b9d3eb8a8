"""`baton plan`: the cheapest fleet that keeps what is promised, found by simulating fleets."""

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
"""The share of requests that keep the promise, with so many prefill and so many decode workers."""


@dataclass(frozen=True)
class Prices:
    """Of a worker of each role, and how many of each there may be."""

    prefill: float = 1.0
    decode: float = 1.0
    most: int = 64


@dataclass
class FleetSearch:
    """One worker more of either role never keeps less: on that the search relies. No fleet is tried
    twice."""

    attainment: Attainment
    wanted: float
    prices: Prices
    tried: dict[tuple[int, int], float] = field(default_factory=dict)

    def cheapest(self) -> tuple[int, int]:
        """Prefill and decode workers. Raises ConfigError where the most are too few."""
        enough = 1
        while not self.keeps(enough, enough):
            if enough == self.prices.most:
                raise ConfigError(
                    f"{enough} prefill and {enough} decode workers keep it for "
                    f"{self.tried[enough, enough]:.1%} of all requests, {self.wanted:.1%} are wanted; "
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
        """0 without workers of a role."""
        if not prefill or not decode:
            return 0.0
        if (prefill, decode) not in self.tried:
            self.tried[prefill, decode] = self.attainment(prefill, decode)
        return self.tried[prefill, decode]

    def price(self, prefill: int, decode: int) -> float:
        return prefill * self.prices.prefill + decode * self.prices.decode

    def _is_too_small(self, prefill: int, decode: int) -> bool:
        """Whether a fleet that is no smaller does not keep it."""
        return any(
            prefill <= source and decode <= pool and share < self.wanted
            for (source, pool), share in self.tried.items()
        )


def least(enough: int, suffices: Callable[[int], bool]) -> int:
    """The smallest count from 1 that does, where `enough` does and all above one that does do."""
    low, high = 0, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class FleetPlan:
    """What was found. The shares are of requests that keep the promise; `aggregated` of as many
    workers that do both, `aggregated_workers` how many of those would be enough, None where
    `Prices.most` are not."""

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
        """For people."""
        size = self.prefill_workers + self.decode_workers
        yield (
            f"{self.prefill_workers} prefill and {self.decode_workers} decode workers, at {self.price:g}: "
            f"{self.share:.1%} of all requests keep TTFT <= {slo.ttft_s:g} s and TPOT <= {slo.tpot_s:g} s"
        )
        yield (
            f"with one prefill worker less {self.share_with_a_prefill_worker_less:.1%}, with one decode worker less "
            f"{self.share_with_a_decode_worker_less:.1%}"
        )
        verdict = "better" if self.aggregated > self.share else "no better"
        yield f"{size} workers that do both would keep it for {self.aggregated:.1%}, which is {verdict}"
        yield (
            "however many did both, it would not be enough"
            if self.aggregated_workers is None
            else f"{self.aggregated_workers} that do both would be enough"
        )
        yield f"{self.fleets_tried} fleets tried in {self.machine_wall_s:.0f} s"


def plan_fleet(
    config: FleetConfig, load: list[Planned], slo: Slo, wanted: float, prices: Prices
) -> FleetPlan:
    """Plan for this load, and say on stderr how each fleet does that is tried. Raises ConfigError
    where no fleet that is allowed is enough."""
    began_s = time.perf_counter()

    def attainment(prefill: int, decode: int) -> float:
        run = simulate(replace(config, num_prefill=prefill, num_decode=decode), load)
        share = sum(map(slo.is_met, run.outcomes)) / len(load)
        print(
            f"{prefill} prefill and {decode} decode workers keep it for {share:.1%}",
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
            min=0.01, max=1.0, callback=finite, help="Of all requests, those that are to keep it."
        ),
    ] = 0.95,
    routers: RoutersFlag = 1,
    most: Annotated[int, typer.Option(min=1, help="Workers of one role that there may be.")] = 64,
    prefill_price: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Of a prefill worker, in any unit.")
    ] = 1.0,
    decode_price: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Of a decode worker.")
    ] = 1.0,
) -> None:
    """Search the cheapest fleet that serves a load within limits, by simulating fleets; and say
    what as many workers that both read and draw would do."""
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
