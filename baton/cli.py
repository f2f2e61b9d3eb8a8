"""The `baton` command. Every failure is one clear line on stderr and a non-zero exit."""

import asyncio
import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.client import DEFAULT_TARGET, AsyncBatonClient, BatonClient
from baton.cluster import LocalCluster
from baton.cluster_config import ClusterConfig, demo_model
from baton.connection import TlsCa, TlsCert, TlsKey, TlsName, TokenFile, advice, connection
from baton.conversation import converse
from baton.demo import run_demo
from baton.finite import finite
from baton.gateway import curl_line
from baton.generate_command import first_question, print_text, prompt_of, read_prompt, structured_output_of
from baton.load import Slo
from baton.load_command import Api, LoadSpec, connect, measure, report
from baton.load_plot import check_can_plot
from baton.render import StartPrinter, event_json, log_printer, status_view
from baton.settings_check import check_settings
from baton.status_command import watch_json, watch_status
from baton.values import ModelInfo, Query, Sampling, Stop
from baton.workload import Arrivals, Lengths, Process, Shape
from runtime.config import MAX_WAIT_S
from runtime.errors import BatonError, ConfigError, RequestAborted, UnavailableError
from runtime.log import human_line
from runtime.security import PeerRole
from runtime.supervision import StopSignal, interruptible, run_process
from runtime.tied import program
from runtime.version import VERSION

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
)

Target = Annotated[list[str] | None, typer.Option(
    show_default=DEFAULT_TARGET, envvar="BATON_TARGET", help="HOST:PORT of the router. Several, repeated or with "
    "commas between them, take turns, and one goes on with what another left unfinished.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, max=MAX_WAIT_S, callback=finite,
                                               help="Give up after this many seconds.")]
Ids = Annotated[bool, typer.Option("--ids", help="The prompt is token ids.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
_LENGTH_HELP = "Lengths of prompts: 192, uniform:96-288, normal:192,48 or exponential:192."


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - a callback's signature
    if wanted:
        print(f"baton {VERSION}")
        raise typer.Exit


@app.callback()
def baton(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                          help="Show the version.")] = False,
) -> None:
    """Serve language models with prefill and decode on separate workers."""


def _targets(given: list[str] | None) -> tuple[str, ...]:
    """Raises ConfigError when none is left of what was given."""
    targets = tuple(part.strip() for text in given or [DEFAULT_TARGET] for part in text.split(",") if part.strip())
    if not targets:
        raise ConfigError("--target must name a router, HOST:PORT", field="target")
    return targets


@contextmanager
def _one_line_errors(target: list[str] | None = None, *, tls_ca: Path | None = None,
                     token_file: Path | None = None) -> Iterator[None]:
    """`target` and the flags are those of a command that connects."""
    try:
        with _told_of_full_disks():
            yield
    except BatonError as error:
        flags = advice(error, target or [DEFAULT_TARGET], tls_ca=tls_ca, token_file=token_file)
        print(f"baton: {error}{flags}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def _told_of_full_disks() -> Iterator[None]:
    """Raises UnavailableError for what a disk did not take."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # What is left of the output would fail once more, and loudly, as the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UnavailableError(f"cannot write {error.filename or 'the output'}: {error.strerror}") from None


@app.command()
def demo(context: typer.Context) -> None:
    """Ask a small local cluster one question. Starts it with the shipped model, shows the timings, and stops it."""

    async def run(stop: StopSignal) -> None:
        with _told_of_full_disks():
            if not await interruptible(stop, run_demo(Console(highlight=False), context.obj)):
                raise RequestAborted("interrupted")

    raise typer.Exit(run_process("baton demo", run))


@app.command()
def up(
    context: typer.Context,
    model: Annotated[Path | None, typer.Option(help="Model directory; default: the demo model.")] = None,
    prefill: Annotated[int, typer.Option(help="Number of prefill pools.")] = 1,
    decode: Annotated[int, typer.Option(help="Number of decode pools.")] = 1,
    prefill_pp: Annotated[int, typer.Option(help="Pipeline stages (processes) of each prefill pool.")] = 1,
    decode_pp: Annotated[int, typer.Option(help="Pipeline stages (processes) of each decode pool.")] = 1,
    prefill_tp: Annotated[int, typer.Option(help="Ranks (processes) that share each prefill stage.")] = 1,
    decode_tp: Annotated[int, typer.Option(help="Ranks (processes) that share each decode stage.")] = 1,
    prefill_dp_attention: Annotated[int, typer.Option(help="Groups of the ranks of a prefill stage with requests of "
                                                           "their own.")] = 1,
    decode_dp_attention: Annotated[int, typer.Option(help="Groups of the ranks of a decode stage with requests of "
                                                          "their own.")] = 1,
    prefill_partition: Annotated[str, typer.Option(help='Layers per prefill stage, like "3,5", or balanced.')] = "",
    decode_partition: Annotated[str, typer.Option(help='Layers per decode stage, like "3,5", or balanced.')] = "",
    routers: Annotated[int, typer.Option(help="Number of routers before them; those after the first take free "
                                              "ports.")] = 1,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT of the router; port 0 takes a free one.",
                                               show_default=DEFAULT_TARGET)] = None,
    memory_mb: Annotated[int | None, typer.Option(min=1, help="Cache memory of each worker in MiB; default: a share of "
                                                              "what is free.")] = None,
    max_context: Annotated[int | None, typer.Option(min=16, help="Tokens of prompt and answer together; default: the "
                                                                "model's, or what the memory holds.")] = None,
    http: Annotated[str, typer.Option(help="HOST:PORT for OpenAI's HTTP API; needs baton[http].")] = "",
    numerics: Annotated[str | None, typer.Option(help="exact (same bits from every topology) or fast.")] = None,
    weights: Annotated[str | None, typer.Option(help="model (its own type) or int8 (eight bits a weight).")] = None,
    device: Annotated[str | None, typer.Option(help="What workers compute on: cpu, cuda or cuda:N.")] = None,
    transport: Annotated[str | None, typer.Option(help="How state moves: auto, shm, tcp or cuda.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model; decode pools then speculate.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with tables router, prefill, decode.")] = None,
    otel_endpoint: Annotated[str | None, typer.Option(help="URL of an OTLP collector; traces go there.")] = None,
    preload: Annotated[bool, typer.Option(help="Load PyTorch once, and fork workers from there (CPU only).")] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Run a whole cluster on this machine, in the foreground. Ctrl-C stops it; a process that dies is restarted."""
    with _one_line_errors():
        security = connection(tls_ca, tls_cert, tls_key, tls_name, token_file)
    worker_flags = [*_flag("--numerics", numerics), *_flag("--weights", weights), *_flag("--device", device),
                    *_flag("--transport", transport), *_flag("--draft", None if draft is None else str(draft)),
                    *_flag("--otel-endpoint", otel_endpoint)]
    settings = ClusterConfig(
        model=model or demo_model(), prefill=prefill, decode=decode, prefill_pp=prefill_pp, decode_pp=decode_pp,
        prefill_tp=prefill_tp, decode_tp=decode_tp, prefill_dp_attention=prefill_dp_attention,
        decode_dp_attention=decode_dp_attention, prefill_partition=prefill_partition,
        decode_partition=decode_partition, routers=routers, listen=listen,
        memory_mb=memory_mb, max_context=max_context, http=http, worker_flags=tuple(worker_flags),
        router_flags=tuple(_flag("--otel-endpoint", otel_endpoint)),
        config_file=config, one_core_each=device in (None, "cpu"),
        forks_workers=preload and device in (None, "cpu"), nursery=context.obj, log_level=log_level,
        security=security)

    async def run(stop: StopSignal) -> None:
        with _told_of_full_disks():
            await interruptible(stop, _serve(settings, Console(highlight=False)))

    raise typer.Exit(run_process("baton up", run))


def _flag(name: str, value: str | None) -> list[str]:
    return [] if value is None else [name, value]


async def _serve(settings: ClusterConfig, console: Console) -> None:
    """Until cancelled."""
    sink = log_printer(console)
    printer = StartPrinter(sink, own="baton")
    if settings.log_level == "debug":
        printer.ready()
    settings.check()
    await check_settings(settings)
    async with LocalCluster(settings, sink=printer) as cluster:
        printer.ready()
        for name, process in cluster.processes.items():
            if (where := process.announcement) is not None:
                sink("baton", human_line(f"{name}: {where.address}, metrics on port {where.metrics_port}"))
        sink("baton", human_line(f"metrics:  prometheus --config.file={cluster.write_scrape_config()}"))
        target = "" if cluster.addresses == (DEFAULT_TARGET,) else f" --target {','.join(cluster.addresses)}"
        served: ModelInfo | None = None
        with suppress(BatonError):  # a client may have to show what this command was not given
            async with AsyncBatonClient(cluster.address, security=settings.security.to(PeerRole.ROUTER)) as client:
                served = await client.model_info()
        question = first_question(None if settings.model == demo_model() else served)
        sink("baton", human_line(f"ready: try  baton generate {question} --temperature 0{target}"))
        if settings.http and served is not None:
            sink("baton", human_line(f"over HTTP:  {curl_line(cluster.http_address, served.model)}"))
        try:
            await cluster.wait_ended()
        except asyncio.CancelledError:
            sink("baton", human_line("stopping when what runs has ended; Ctrl-C once more stops it at once"))
            raise


def _add_program(name: str, module: str, summary: str) -> None:
    """A command that becomes `python -m MODULE`, which reads the flags."""
    @app.command(name, help=f"{summary} See `baton {name} --help`.", add_help_option=False, context_settings={
        "ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
    def become(context: typer.Context) -> None:
        with _one_line_errors():
            command = program(module, *context.args)
        os.execv(sys.executable, command)


_add_program("router", "router", "Run one router, as a container does.")
_add_program("gateway", "baton.gateway", "Serve OpenAI's HTTP API before routers.")
_add_program("prefill", "prefill", "Run one process of a prefill pool.")
_add_program("decode", "decode", "Run one process of a decode pool.")
_add_program("check", "pool.check", "Say whether a model would be served, and what it takes.")
_add_program("simulate", "sim", "Try a fleet in virtual time before it is there.")
_add_program("plan", "sim.plan", "Search the cheapest fleet for a load, by simulating fleets.")


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text, or with --ids token ids like 1,2,3; - or none: stdin.",
                                                 show_default=False)] = None,
    target: Target = None,
    ids: Ids = False,
    as_chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message, to be answered.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after this many tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the most likely token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the smallest set with this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeat for more.")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="File with a JSON schema for the answer.")] = None,
    regex: Annotated[str | None, typer.Option(help="What the whole answer must match.")] = None,
    num_choices: Annotated[int | None, typer.Option("--n", help="Answers to draw, shown when they are whole.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: logprobs, and so many alternatives.")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="With --json: the same of the prompt's tokens.")] = None,
    model: Annotated[str, typer.Option(help="Refuse unless this model is served.")] = "",
    speculate: Annotated[bool | None, typer.Option("--speculate/--no-speculate", help="Use drafts where there are "
                                                   "any; the answer is the same.", show_default="yes")] = None,
    prefix_cache: Annotated[bool | None, typer.Option("--prefix-cache/--no-prefix-cache", help="Use what earlier "
                                                      "prompts left; the answer is the same.",
                                                      show_default="yes")] = None,
    cache_salt: Annotated[str, typer.Option(help="Share cached prompts only with requests of this salt.")] = "",
    timeout: Timeout = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Continue a prompt, or with --chat answer it. Streams the text."""
    with _one_line_errors(target, tls_ca=tls_ca, token_file=token_file):
        query = Query(
            prompt=prompt_of(read_prompt(prompt), ids=ids, as_chat=as_chat),
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
            stop=Stop(max_tokens=max_tokens, strings=tuple(stop or ())), model=model, n=num_choices,
            num_top_logprobs=logprobs, num_prompt_logprobs=prompt_logprobs, speculate=speculate,
            structured_output=structured_output_of(json_schema, regex), prefix_cache=prefix_cache,
            cache_salt=cache_salt)
        security = connection(tls_ca, tls_cert, tls_key, tls_name, token_file)
        with BatonClient(*_targets(target), security=security) as client:
            events = client.generate(query, timeout_s=timeout)
            if as_json:
                for event in events:
                    print(event_json(event), flush=True)
            else:
                print_text(events, query)


@app.command()
def chat(
    target: Target = None,
    system: Annotated[str, typer.Option(help="A first message with the role system.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 takes the most likely token.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    timeout: Timeout = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Talk to the model; it sees the whole conversation. End with Ctrl-D."""
    with (_one_line_errors(target, tls_ca=tls_ca, token_file=token_file),
          BatonClient(*_targets(target), security=connection(tls_ca, tls_cert, tls_key, tls_name,
                                                             token_file)) as client):
        converse(client, system=system, sampling=Sampling(temperature=temperature), stop=Stop(max_tokens=max_tokens),
                 timeout_s=timeout)


@app.command()
def status(
    target: Target = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Workers, pools, pages and sessions at a glance. Exit code 1 unless every worker serves."""
    with _one_line_errors(target, tls_ca=tls_ca, token_file=token_file):
        security = connection(tls_ca, tls_cert, tls_key, tls_name, token_file)
        with BatonClient(*_targets(target), security=security) as client:
            if watch and as_json:
                return watch_json(client)
            if watch:
                watch_status(client, Console())
            seen = client.cluster_status()
        if as_json:
            print(json.dumps(asdict(seen)))
        else:
            Console().print(status_view(seen))
        if not all(worker.serving for worker in seen.workers):
            raise typer.Exit(1)


@app.command()
def flush(
    target: Target = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Empty the prefix caches of all workers. Where there are certificates, only an operator's may. Exit code 1 unless
    every worker did."""
    with _one_line_errors(target, tls_ca=tls_ca, token_file=token_file):
        security = connection(tls_ca, tls_cert, tls_key, tls_name, token_file)
        with BatonClient(*_targets(target), security=security) as client:
            flushed = client.flush_caches()
    for each in flushed:
        text = f"{each.role} {each.address}: {each.error or f'{each.pages} pages'}"
        print(json.dumps(asdict(each)) if as_json else text)
    if any(each.error for each in flushed):
        raise typer.Exit(1)


@app.command()
def load(
    target: Target = None,
    api: Annotated[Api, typer.Option(help="What the target speaks: Baton's own API, or VllmEngine's.")] = Api.BATON,
    requests: Annotated[int, typer.Option(min=1, help="How many to send.")] = 60,
    rate: Annotated[float, typer.Option(min=0.001, callback=finite, help="Mean arrivals per second.")] = 4.0,
    arrival: Annotated[Process, typer.Option(help="How arrivals are spread.")] = Process.POISSON,
    burst: Annotated[int, typer.Option(min=1, help="Requests per burst, with --arrival burst.")] = 8,
    prompt_tokens: Annotated[str, typer.Option(help=_LENGTH_HELP)] = "uniform:96-288",
    output_tokens: Annotated[str, typer.Option(help="The same, for what is generated.")] = "32",
    trace: Annotated[Path | None, typer.Option(help="Replay times and lengths of this JSONL file instead.")] = None,
    speed: Annotated[float, typer.Option(min=0.001, callback=finite, help="Replay a trace this much faster.")] = 1.0,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests to send before, and not to count.")] = 2,
    slo_ttft: Annotated[float, typer.Option(min=0.000001, callback=finite,
                                            help="Limit on time to first token, seconds.")] = 0.5,
    slo_tpot: Annotated[float, typer.Option(min=0.000001, callback=finite,
                                            help="Limit on time per further token, seconds.")] = 0.05,
    timeout: Annotated[float, typer.Option(min=0.001, max=MAX_WAIT_S, callback=finite,
                                           help="Give a request up after this many seconds.")] = 60.0,
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests at the same times.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the run into this .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token_file: TokenFile = None,
) -> None:
    """Measure how a cluster keeps up with a load. Sends requests when they are due, however slow the answers are, and
    reports TTFT, TPOT, ITL and goodput. Exit code 1 if any failed."""
    console = Console(stderr=True, highlight=False)

    async def run(spec: LoadSpec) -> dict[str, object]:
        security = connection(tls_ca, tls_cert, tls_key, tls_name, token_file)
        async with connect(api, _targets(target), security) as client:
            figures, _ = await measure(client, spec, console)
            return figures

    with _one_line_errors(target, tls_ca=tls_ca, token_file=token_file):
        if plot is not None:
            check_can_plot(plot)
        shape = Shape(Lengths.parse(prompt_tokens, field="prompt_tokens"),
                      Lengths.parse(output_tokens, field="output_tokens"))
        figures = asyncio.run(run(LoadSpec(
            api, requests, Arrivals(arrival, rate, burst), shape, Slo(slo_ttft, slo_tpot), trace, speed, warm_up, seed,
            timeout, plot)))
        if as_json:
            print(json.dumps(figures))
        else:
            for part in report(figures):
                Console(highlight=False).print(part)
        if figures["failed"]:
            raise typer.Exit(1)
