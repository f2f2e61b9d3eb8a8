"""`baton simulate`: the behavior of a fleet under a load."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated

import typer

from baton.finite import finite
from baton.load import Slo
from baton.load_plot import check_can_plot
from baton.replays import begun, superposed
from baton.traces import read_trace
from baton.workload import (
    Arrivals,
    Lengths,
    Planned,
    Process,
    Shape,
    TooLong,
    changes,
    fitted,
    plan,
)
from router.workers.policy import Policy
from runtime.errors import BatonError, ConfigError
from runtime.observe.log import LogStyle, configure
from runtime.process.standard_streams import open_to_all_text, whole_output
from sim.costs import Costs
from sim.faults import Mishap
from sim.fleet import FleetConfig, simulate
from sim.report import draw, figures_of, lines_of
from sim.router import RouterOptions

_LENGTHS = "Lengths of prompts: 192, uniform:96-288, normal:192,48 or exponential:192."

_FAULTS = (
    "Fault such as kill:decode-3@120+30, cut:prefill-0@60+5, slow:prefill-1@60+30x3, "
    "restart:decode@100 or lose:router-1@60. Repeatable."
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def parse_slo(text: str) -> Slo:
    """Parse an SLO such as "ttft=2s,tpot=50ms".

    Raises:
        ConfigError: the text is malformed.
    """
    try:
        return Slo.parse(text)
    except ValueError as error:
        raise ConfigError(f"--slo {error}", field="slo") from None


RoutersFlag = Annotated[int, typer.Option(min=1, help="Number of routers.")]


@dataclass(frozen=True)
class LoadFlags:
    """Flags that all commands on fleets share: a load, the costs of workers, and an SLO."""

    costs: Annotated[
        Path | None,
        typer.Option(
            help="Costs file that bench.calibrate writes; default: roughly a dense 70B model on eight H100 "
            "per worker."
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Take times, lengths and common blocks from this file: JSONL, Azure's or "
            "BurstGPT's CSV, or a folder of agents' conversations."
        ),
    ] = None
    speed: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Replay a trace this much faster.")
    ] = 1.0
    copies: Annotated[
        int, typer.Option(min=1, help="Copies of the trace to replay at once, with unique prompts.")
    ] = 1
    too_long: Annotated[
        TooLong,
        typer.Option(
            help="Action for requests longer than the context: refuse the "
            "load, skip them, or cut their prompts."
        ),
    ] = TooLong.REFUSE
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests; default: the trace's, or 1000.")
    ] = None
    rate: Annotated[
        float,
        typer.Option(
            min=0.001,
            callback=finite,
            help="Mean arrivals per second: of requests without a trace, or of agents' conversations.",
        ),
    ] = 4.0
    arrival: Annotated[Process, typer.Option(help="Arrival process.")] = Process.POISSON
    burst: Annotated[int, typer.Option(min=1, help="Requests per burst, with --arrival burst.")] = 8
    prompt_tokens: Annotated[str, typer.Option(help=_LENGTHS)] = "exponential:4000"
    output_tokens: Annotated[str, typer.Option(help="Lengths of outputs, in the same form.")] = (
        "exponential:300"
    )
    slower: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=1000,
            callback=finite,
            help="Factor on the workers' compute costs.",
        ),
    ] = 1.0
    policy: Annotated[Policy, typer.Option(help="Policy by which routers choose workers.")] = (
        Policy.PREFIX_CACHE
    )
    slo: Annotated[str, typer.Option(help="Limits that a good request meets.")] = (
        "ttft=2s,tpot=50ms"
    )
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.")] = 0
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False

    def costs_read(self) -> Costs:
        """Load the costs and apply `slower`.

        Raises:
            ConfigError: the file cannot be read or is invalid.
        """
        return (Costs() if self.costs is None else Costs.read(self.costs)).times(self.slower)

    @property
    def _arrivals(self) -> Arrivals:
        return Arrivals(self.arrival, self.rate, self.burst)

    def planned(self, costs: Costs) -> list[Planned]:
        """Return the load, and print to stderr how it differs from the request.

        Raises:
            ConfigError: the trace or the lengths are invalid, or a request is too long.
        """
        unanswered = 0
        if self.trace is not None:
            trace = read_trace(self.trace, speed=self.speed)
            recorded = list(trace.planned)
            if not trace.is_timed:
                recorded = begun(recorded, self._arrivals, seed=self.seed)
            load = superposed(recorded, self.copies, seed=self.seed)[: self.requests]
            unanswered = trace.num_unanswered
        else:
            shape = Shape(
                Lengths.parse(self.prompt_tokens, field="prompt_tokens"),
                Lengths.parse(self.output_tokens, field="output_tokens"),
            )
            load = plan(
                self.requests or 1000,
                self._arrivals,
                shape,
                seed=self.seed,
            )
        most = costs.model.max_context_tokens
        fitting = fitted(load, most, self.too_long)
        for line in changes(
            cut=fitting.num_cut,
            skipped=fitting.num_skipped,
            unanswered=unanswered,
            max_context_tokens=most,
        ):
            print(line, file=sys.stderr)
        return list(fitting.planned)


def with_load_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the fields of its first argument, a `LoadFlags`, to the flags of a command."""
    shared = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(LoadFlags)
    ]
    own = [
        each.replace(kind=Parameter.KEYWORD_ONLY)
        for each in list(signature(command).parameters.values())[1:]
    ]

    def taking_flags(**given: object) -> None:
        flags = {each.name: given.pop(each.name) for each in shared}
        command(LoadFlags(**flags), **given)  # type: ignore[arg-type]  # typer has checked them

    taking_flags.__doc__ = command.__doc__
    taking_flags.__signature__ = Signature([*own, *shared])  # type: ignore[attr-defined]  # typer uses it
    taking_flags.__annotations__ = {each.name: each.annotation for each in (*own, *shared)}
    return taking_flags


@app.command()
@with_load_flags
def command(
    flags: LoadFlags,
    prefill: Annotated[
        int | None,
        typer.Option(min=0, help="Number of prefill workers; default: 2, or 0 with --worker."),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(min=0, help="Number of decode workers; default: 1, or 0 with --worker."),
    ] = None,
    worker: Annotated[
        int, typer.Option(min=0, help="Number of workers that prefill and decode.")
    ] = 0,
    planner: Annotated[
        bool,
        typer.Option("--planner", help="Switch the roles of --worker workers to fit the load."),
    ] = False,
    routers: RoutersFlag = 1,
    watch_interval: Annotated[
        float,
        typer.Option(
            min=0.05, max=60, callback=finite, help="Seconds between two reports of a worker."
        ),
    ] = 0.25,
    pull_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Prompt tokens that a pull between workers must save; 0: no pulls."
        ),
    ] = RouterOptions.pull_tokens,
    fault: Annotated[
        list[str] | None,
        typer.Option(help=_FAULTS),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the run to this .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Simulate a fleet: the router's own code, and models of workers and links, in virtual time."""
    with one_line_errors("simulate"):
        if plot is not None:
            check_can_plot(plot)
        limits = parse_slo(flags.slo)
        config = FleetConfig(
            (0 if worker else 2) if prefill is None else prefill,
            (0 if worker else 1) if decode is None else decode,
            routers,
            flags.costs_read(),
            RouterOptions(flags.policy, watch_interval, pull_tokens=pull_tokens),
            tuple(map(Mishap.parse, fault or ())),
            flags.seed,
            worker,
            limits if planner else None,
        )
        config.check()
        run = simulate(config, flags.planned(config.costs))
        figures = figures_of(run, config, limits)
        print(json.dumps(figures) if flags.as_json else "\n".join(lines_of(figures)))
        if plot is not None:
            draw(run, config, limits, plot)


@contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """Report errors of `baton COMMAND` as one line on stderr."""
    try:
        yield
    except BatonError as error:
        print(f"baton {command}: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def run_program(program: typer.Typer, name: str) -> None:
    """Run a simulation program without the logs of routers and workers."""
    open_to_all_text()
    configure(level="error", style=LogStyle.HUMAN, role="simulation")
    with whole_output(name):
        program(prog_name=name)
