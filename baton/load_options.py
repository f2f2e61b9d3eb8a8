"""Options of `baton load`, and the run that they describe."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from baton.command_line import AsJson, CommandOptions, TargetOption
from baton.connection import ConnectionFlags, TlsCa, TlsCert, TlsKey, TlsName, TokenFile
from baton.finite import finite
from baton.load import Slo
from baton.load_command import DEFAULT_COUNT, Api, LoadSpec
from baton.workload import Arrivals, Lengths, Process, Shape, TooLong, TurnShape
from runtime.config import MAX_WAIT_S

_LENGTH_HELP = "Prompt lengths: 192, uniform:96-288, normal:192,48 or exponential:192."


class LoadOptions(CommandOptions):
    """Options of `baton load`."""

    target: TargetOption = None
    api: Annotated[Api, typer.Option(help="API of the target: Baton's own, or VllmEngine's.")] = (
        Api.BATON
    )
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Number of requests; default: the whole trace, or {DEFAULT_COUNT}."
        ),
    ] = None
    rate: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Mean arrivals per second.")
    ] = 4.0
    arrival: Annotated[Process, typer.Option(help="Distribution of arrivals.")] = Process.POISSON
    burst: Annotated[int, typer.Option(min=1, help="Requests per burst, with --arrival burst.")] = 8
    prompt_tokens: Annotated[str, typer.Option(help=_LENGTH_HELP)] = "uniform:96-288"
    output_tokens: Annotated[str, typer.Option(help="Output lengths, in the same form.")] = "32"
    turns: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="Turns of the conversation that each request begins."),
    ] = 1
    turn_tokens: Annotated[
        str,
        typer.Option(help="Tokens that each later turn adds to the response, in the same form."),
    ] = "uniform:16-64"
    pause: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=MAX_WAIT_S,
            callback=finite,
            help="Seconds from a response to the next turn.",
        ),
    ] = 1.0
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay times and lengths of this file instead: JSONL, the CSV of Azure or "
            "BurstGPT, or a folder of agents' conversations."
        ),
    ] = None
    speed: Annotated[
        float,
        typer.Option(min=0.001, callback=finite, help="Replay a trace faster by this factor."),
    ] = 1.0
    users: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Conversations at a time; the next begins when one ends. Default: each begins at "
            "its time.",
        ),
    ] = None
    max_pause: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=MAX_WAIT_S,
            callback=finite,
            help="Limit on the pauses of a trace's conversations, in seconds.",
        ),
    ] = None
    shrink: Annotated[
        int,
        typer.Option(
            min=1, max=1_000_000, help="Divide the lengths of a trace, for smaller contexts."
        ),
    ] = 1
    sessions: Annotated[
        bool,
        typer.Option(
            "--sessions",
            help="Name the session of each conversation, so that caches keep its newest turn longer.",
        ),
    ] = False
    too_long: Annotated[
        TooLong,
        typer.Option(
            help="How to handle requests longer than the context: reject the load, skip them, or cut "
            "their prompts."
        ),
    ] = TooLong.REFUSE
    warm_up: Annotated[
        int, typer.Option(min=0, help="Warm-up requests, sent first and not counted.")
    ] = 2
    slo_ttft: Annotated[
        float,
        typer.Option(
            min=0.000001, callback=finite, help="Limit on time to first token, in seconds."
        ),
    ] = 0.5
    slo_tpot: Annotated[
        float,
        typer.Option(
            min=0.000001, callback=finite, help="Limit on time per further token, in seconds."
        ),
    ] = 0.05
    timeout: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=MAX_WAIT_S,
            callback=finite,
            help="Cancel a request after this many seconds.",
        ),
    ] = 60.0
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed; the same seed sends the same requests at the same times. Default: a "
            "new one, so that no cache has the prompts."
        ),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(help="Plot the run into this .png, .svg or .pdf file.")
    ] = None
    as_json: AsJson = False
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_name: TlsName = ""
    token_file: TokenFile = None

    def connection(self) -> ConnectionFlags:
        """Return the flags that select credentials."""
        return ConnectionFlags(
            self.tls_ca, self.tls_cert, self.tls_key, self.tls_name, self.token_file
        )

    def spec(self) -> LoadSpec:
        """Return the run to measure, with a new seed if none was given.

        Raises:
            ConfigError: a length is invalid; names the flag.
        """
        return LoadSpec(
            api=self.api,
            count=self.requests,
            arrivals=Arrivals(self.arrival, self.rate, self.burst),
            shape=Shape(
                Lengths.parse(self.prompt_tokens, field="prompt_tokens"),
                Lengths.parse(self.output_tokens, field="output_tokens"),
            ),
            slo=Slo(self.slo_ttft, self.slo_tpot),
            trace=self.trace,
            sessions=self.sessions,
            speed=self.speed,
            warm_up=self.warm_up,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            timeout_s=self.timeout,
            picture=self.plot,
            users=self.users,
            max_pause_s=self.max_pause,
            shrink=self.shrink,
            too_long=self.too_long,
            turns=TurnShape(
                self.turns, Lengths.parse(self.turn_tokens, field="turn_tokens"), self.pause
            )
            if self.turns > 1
            else None,
        )
