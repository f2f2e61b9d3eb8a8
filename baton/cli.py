"""The `baton` command.

Every failure is one line on stderr and a non-zero exit code.
"""

import asyncio
import json
import os
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.chat_options import Messages, TemplateArguments, Tools, read_options
from baton.client import BatonClient
from baton.command_line import AsJson, TargetOption, Timeout, one_line_errors, targets_of
from baton.connection import TlsCa, TlsCert, TlsKey, TlsName, TokenFile, connection
from baton.conversation import converse
from baton.demo import run_demo
from baton.finite import finite
from baton.generate_command import print_text, prompt_of, structured_output_of
from baton.load import Slo
from baton.load_command import DEFAULT_COUNT, Api, LoadSpec, connect, measure, report
from baton.load_plot import check_can_plot
from baton.render import event_json, status_view, wide_enough
from baton.status_command import watch_json, watch_status
from baton.up_command import up
from baton.values import Query, Sampling, Stop
from baton.workload import Arrivals, Lengths, Process, Shape, TooLong
from runtime.config import MAX_WAIT_S
from runtime.errors import RequestAborted
from runtime.process.child_process import program
from runtime.process.standard_streams import reporting_full_disk
from runtime.process.supervision import StopSignal, interruptible, run_process
from runtime.version import VERSION

IdsFlag = Annotated[bool, typer.Option("--ids", help="The prompt is a list of token ids.")]
_LENGTH_HELP = "Prompt lengths: 192, uniform:96-288, normal:192,48 or exponential:192."

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - a callback's signature
    if wanted:
        print(f"baton {VERSION}")
        raise typer.Exit


@app.callback()
def baton(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serve language models with prefill and decode on separate workers."""


@app.command()
def demo(context: typer.Context) -> None:
    """Ask a small local cluster one question. Starts it with the included model, shows the timings,
    and stops it."""

    async def run(stop: StopSignal) -> None:
        with reporting_full_disk():
            if not await interruptible(stop, run_demo(Console(highlight=False), context.obj)):
                raise RequestAborted("interrupted")

    raise typer.Exit(run_process("baton demo", run))


app.command()(up)


def _add_program(name: str, module: str, summary: str) -> None:
    """Add a command that runs `python -m MODULE`; the module reads the flags."""

    @app.command(
        name,
        help=f"{summary} See `baton {name} --help`.",
        add_help_option=False,
        context_settings={
            "ignore_unknown_options": True,
            "allow_extra_args": True,
            "help_option_names": [],
        },
    )
    def become(context: typer.Context) -> None:
        with one_line_errors():
            command = program("baton.program", module, *context.args)
        os.execv(sys.executable, command)


_add_program("router", "router", "Run one router in the foreground.")
_add_program("gateway", "baton.gateway", "Serve OpenAI's HTTP API in front of routers.")
_add_program("prefill", "prefill", "Run one process of a prefill pool.")
_add_program("decode", "decode", "Run one process of a decode pool.")
_add_program("check", "pool.check", "Check that a model can be served; show its memory.")
_add_program("simulate", "sim", "Simulate a fleet in virtual time before you build it.")
_add_program("plan", "sim.plan", "Find the cheapest fleet for a load by simulation.")


@app.command()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text, or with --ids token ids like 1,2,3. Without it, or with -: stdin.",
            show_default=False,
        ),
    ] = None,
    target: TargetOption = None,
    ids: IdsFlag = False,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a chat message.")
    ] = False,
    messages: Messages = None,
    tools: Tools = None,
    template_argument: TemplateArguments = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens to generate.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 takes the most likely token.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the smallest set of tokens with this total probability."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed; the same seed gives the same response.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; repeatable.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the response must match.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole response must match.")
    ] = None,
    num_choices: Annotated[
        int | None,
        typer.Option("--n", help="Number of responses to generate, shown when complete."),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: logprobs of the tokens, with this number of alternatives."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="With --json: logprobs of the prompt's tokens, likewise.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Reject the request unless this model is served.")
    ] = "",
    speculate: Annotated[
        bool | None,
        typer.Option(
            "--speculate/--no-speculate",
            help="Use speculative decoding if available; the response is the same.",
            show_default="yes",
        ),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Use the prefix cache; the response is the same.",
            show_default="yes",
        ),
    ] = None,
    cache_salt: Annotated[
        str, typer.Option(help="Share cached prompts only with requests that have the same salt.")
    ] = "",
    timeout: Timeout = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Continue a prompt, or respond to it with --chat. Streams the text."""
    with one_line_errors(target, tls_ca=tls_ca, token_file=token_file):
        options = read_options(tools, template_argument)
        query = Query(
            prompt=prompt_of(prompt, messages, ids=ids, as_chat=as_chat),
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
            stop=Stop(max_tokens=max_tokens, strings=tuple(stop or ())),
            model=model,
            n=num_choices,
            num_top_logprobs=logprobs,
            num_prompt_logprobs=prompt_logprobs,
            speculate=speculate,
            structured_output=structured_output_of(json_schema, regex),
            prefix_cache=prefix_cache,
            cache_salt=cache_salt,
            tools=options.tools,
            template_arguments=options.template_arguments,
        )
        security = connection(tls_ca, tls_cert, tls_key, tls_name, token_file)
        with BatonClient(*targets_of(target), security=security) as client:
            events = client.generate(query, timeout_s=timeout)
            if as_json:
                for event in events:
                    print(event_json(event), flush=True)
            else:
                print_text(events, query)


@app.command()
def chat(
    target: TargetOption = None,
    system: Annotated[
        str, typer.Option(help="System message at the start of the conversation.")
    ] = "",
    tools: Tools = None,
    template_argument: TemplateArguments = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 takes the most likely token.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    timeout: Timeout = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Chat with the model; each turn sends the whole conversation. End with Ctrl-D."""
    with (
        one_line_errors(target, tls_ca=tls_ca, token_file=token_file),
        BatonClient(
            *targets_of(target),
            security=connection(tls_ca, tls_cert, tls_key, tls_name, token_file),
        ) as client,
    ):
        converse(
            client,
            system=system,
            options=read_options(tools, template_argument),
            sampling=Sampling(temperature=temperature),
            stop=Stop(max_tokens=max_tokens),
            timeout_s=timeout,
        )


@app.command()
def status(
    target: TargetOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Show workers, pools, pages and sessions. Exit code 1 unless every worker serves."""
    with one_line_errors(target, tls_ca=tls_ca, token_file=token_file):
        security = connection(tls_ca, tls_cert, tls_key, tls_name, token_file)
        with BatonClient(*targets_of(target), security=security) as client:
            if watch and as_json:
                return watch_json(client)
            if watch:
                watch_status(client, Console())
            seen = client.cluster_status()
        if as_json:
            print(json.dumps(asdict(seen)))
        else:
            wide_enough().print(status_view(seen))
        if not all(worker.serving for worker in seen.workers):
            raise typer.Exit(1)


@app.command()
def flush(
    target: TargetOption = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Empty the prefix caches of all workers. With TLS, only an operator may do so. Exit code 1
    unless every worker did."""
    with one_line_errors(target, tls_ca=tls_ca, token_file=token_file):
        security = connection(tls_ca, tls_cert, tls_key, tls_name, token_file)
        with BatonClient(*targets_of(target), security=security) as client:
            flushed = client.flush_caches()
    for each in flushed:
        text = f"{each.role} {each.address}: {each.error or f'{each.pages} pages'}"
        print(json.dumps(asdict(each)) if as_json else text)
    if any(each.error for each in flushed):
        raise typer.Exit(1)


@app.command()
def load(
    target: TargetOption = None,
    api: Annotated[
        Api, typer.Option(help="API of the target: Baton's own, or VllmEngine's.")
    ] = Api.BATON,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Number of requests; default: the whole trace, or {DEFAULT_COUNT}."
        ),
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Mean arrivals per second.")
    ] = 4.0,
    arrival: Annotated[Process, typer.Option(help="Distribution of arrivals.")] = Process.POISSON,
    burst: Annotated[
        int, typer.Option(min=1, help="Requests per burst, with --arrival burst.")
    ] = 8,
    prompt_tokens: Annotated[str, typer.Option(help=_LENGTH_HELP)] = "uniform:96-288",
    output_tokens: Annotated[str, typer.Option(help="Output lengths, in the same form.")] = "32",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay times and lengths of this file instead: JSONL, or the CSV of Azure or "
            "BurstGPT."
        ),
    ] = None,
    speed: Annotated[
        float,
        typer.Option(min=0.001, callback=finite, help="Replay a trace faster by this factor."),
    ] = 1.0,
    too_long: Annotated[
        TooLong,
        typer.Option(
            help="How to handle requests longer than the context: reject the load, skip them, or cut "
            "their prompts."
        ),
    ] = TooLong.REFUSE,
    warm_up: Annotated[
        int, typer.Option(min=0, help="Warm-up requests, sent first and not counted.")
    ] = 2,
    slo_ttft: Annotated[
        float,
        typer.Option(
            min=0.000001, callback=finite, help="Limit on time to first token, in seconds."
        ),
    ] = 0.5,
    slo_tpot: Annotated[
        float,
        typer.Option(
            min=0.000001, callback=finite, help="Limit on time per further token, in seconds."
        ),
    ] = 0.05,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=MAX_WAIT_S,
            callback=finite,
            help="Cancel a request after this many seconds.",
        ),
    ] = 60.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed; the same seed sends the same requests at the same times. Default: a "
            "new one, so that no cache has the prompts."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the run into this .png, .svg or .pdf file.")
    ] = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Measure how a cluster performs under load. Sends requests on schedule, even when responses
    are slow, and reports TTFT, TPOT, ITL and goodput. Exit code 1 if a request failed."""
    console = Console(stderr=True, highlight=False)

    async def run(spec: LoadSpec) -> dict[str, object]:
        security = connection(tls_ca, tls_cert, tls_key, tls_name, token_file)
        async with connect(api, targets_of(target), security) as client:
            figures, _ = await measure(client, spec, console)
            return figures

    with one_line_errors(target, tls_ca=tls_ca, token_file=token_file):
        if plot is not None:
            check_can_plot(plot)
        shape = Shape(
            Lengths.parse(prompt_tokens, field="prompt_tokens"),
            Lengths.parse(output_tokens, field="output_tokens"),
        )
        figures = asyncio.run(
            run(
                LoadSpec(
                    api,
                    requests,
                    Arrivals(arrival, rate, burst),
                    shape,
                    Slo(slo_ttft, slo_tpot),
                    trace,
                    speed,
                    warm_up,
                    secrets.randbits(32) if seed is None else seed,
                    timeout,
                    plot,
                    too_long,
                )
            )
        )
        if as_json:
            print(json.dumps(figures))
        else:
            for part in report(figures):
                wide_enough().print(part, soft_wrap=isinstance(part, str))
        if figures["failed"]:
            raise typer.Exit(1)
