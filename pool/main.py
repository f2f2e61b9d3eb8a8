"""The command line of a worker process, shared by `python -m prefill` and `python -m decode`."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from pool.stage.config import WorkerConfig
from runtime.config import leader_from_environment, load, number_from_environment
from runtime.errors import ConfigError
from runtime.observe.log import report_end
from runtime.process.host_memory import is_out_of_memory, memory_left
from runtime.process.supervision import EXIT_CONFIG, EXIT_FAILED

ENVIRONMENT_HELP = (
    "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are read where the flags are absent."
)


Start = Callable[[dict[str, object], Path | None], int]


def worker_command(role_name: str, start: Start) -> typer.Typer:
    """`start(flags, file)` runs the role and returns the exit code; it may import torch, this
    module does not."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command(help=f"Run one process of a {role_name} pool. {ENVIRONMENT_HELP}")
    def run(
        model: Annotated[Path | None, typer.Option(help="Directory of the checkpoint.")] = None,
        model_name: Annotated[
            str | None, typer.Option(help="Name clients know the model by.")
        ] = None,
        listen: Annotated[
            str | None, typer.Option(help="HOST:PORT of the gRPC server; port 0: any.")
        ] = None,
        metrics_port: Annotated[int | None, typer.Option(help="Port of /metrics; 0: any.")] = None,
        metrics_host: Annotated[
            str | None, typer.Option(help="Address /metrics is served on.")
        ] = None,
        health_listen: Annotated[
            str | None, typer.Option(help="HOST:PORT for probes without TLS.")
        ] = None,
        tls_cert: Annotated[
            Path | None, typer.Option(help="PEM certificate; its DNS name is the role.")
        ] = None,
        tls_key: Annotated[
            Path | None, typer.Option(help="PEM key of the certificate, not encrypted.")
        ] = None,
        tls_ca: Annotated[
            Path | None, typer.Option(help="PEM certificates of the roles' authority.")
        ] = None,
        announce: Annotated[
            Path | None, typer.Option(help="Write addresses to this file once listening.")
        ] = None,
        rank: Annotated[int | None, typer.Option(help="Process of the pool; 0 leads it.")] = None,
        world_size: Annotated[int | None, typer.Option(help="Processes of the pool.")] = None,
        tp: Annotated[
            int | None, typer.Option(help="Ranks (processes) that share each stage.")
        ] = None,
        ep: Annotated[
            int | None, typer.Option(help="Ranks that experts are spread over: --tp.")
        ] = None,
        dp_attention: Annotated[
            int | None, typer.Option(help="Groups of these with requests of their own.")
        ] = None,
        overlap_tokens: Annotated[
            int | None, typer.Option(help="Run so large a batch in two halves (--tp).")
        ] = None,
        overlap_steps: Annotated[
            bool | None, typer.Option(help="Prepare a step while one computes.")
        ] = None,
        leader: Annotated[
            str | None, typer.Option(help="HOST:PORT or file:///PATH of stage 0.")
        ] = None,
        partition: Annotated[
            str | None, typer.Option(help='Layers per stage, "3,5", or balanced.')
        ] = None,
        page_size: Annotated[int | None, typer.Option(help="Tokens per cache page.")] = None,
        num_pages: Annotated[
            int | None, typer.Option(help="Cache pages; 0: from --memory-mb.")
        ] = None,
        memory_mb: Annotated[
            int | None, typer.Option(help="Cache memory per stage in MiB.")
        ] = None,
        memory_share: Annotated[
            float | None, typer.Option(help="Share of the machine for weights and cache.")
        ] = None,
        max_context: Annotated[
            int | None, typer.Option(help="Tokens of prompt and answer; 0: the model's.")
        ] = None,
        max_running: Annotated[
            int | None, typer.Option(help="Requests that compute at a time.")
        ] = None,
        max_landing: Annotated[
            int | None, typer.Option(help="Requests held beyond them; 0: by a rule.")
        ] = None,
        max_queued: Annotated[int | None, typer.Option(help="Prompts that may wait.")] = None,
        chunk_tokens: Annotated[int | None, typer.Option(help="Prompt tokens per forward.")] = None,
        prefix_cache: Annotated[
            bool | None, typer.Option(help="Keep what prompts left for others.")
        ] = None,
        decode_cache: Annotated[
            bool | None, typer.Option(help="Keep what landed; be sent the rest.")
        ] = None,
        local_rest_tokens: Annotated[
            int | None, typer.Option(help="Compute so short a rest (decode).")
        ] = None,
        prefix_snapshots: Annotated[
            int | None, typer.Option(help="Recurrent states kept with it; 0: as fit.")
        ] = None,
        step_limit_s: Annotated[
            float | None, typer.Option(help="Seconds a step may take; 0: as measured.")
        ] = None,
        numerics: Annotated[str | None, typer.Option(help="exact or fast.")] = None,
        weights: Annotated[
            str | None, typer.Option(help="model or int8: eight bits a weight.")
        ] = None,
        device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
        cuda_graphs: Annotated[
            bool | None, typer.Option(help="Replay steps, not run each anew.")
        ] = None,
        threads: Annotated[int | None, typer.Option(help="Compute threads.")] = None,
        transport: Annotated[
            str | None, typer.Option(help="UCX profile: auto, shm, tcp or cuda.")
        ] = None,
        transport_interface: Annotated[
            str | None, typer.Option(help="Network devices UCX listens on.")
        ] = None,
        transport_ports: Annotated[
            str | None, typer.Option(help="TCP ports UCX listens in, LOW-HIGH.")
        ] = None,
        stage_channel: Annotated[
            str | None, typer.Option(help="Tensors between stages: auto, ucx or nccl.")
        ] = None,
        draft: Annotated[
            Path | None, typer.Option(help="Draft model: decode pools then speculate.")
        ] = None,
        spec_topk: Annotated[
            int | None, typer.Option(help="Drafted continuations per node; 1: chains.")
        ] = None,
        spec_steps: Annotated[
            int | None, typer.Option(help="Tokens drafted ahead at most.")
        ] = None,
        spec_draft_tokens: Annotated[
            int | None, typer.Option(help="Drafted tokens per step and request.")
        ] = None,
        spec_prompt: Annotated[
            bool | None, typer.Option(help="Hand over what the draft made of prompts.")
        ] = None,
        spec_adaptive: Annotated[
            bool | None, typer.Option(help="Shorten drafts while that yields more.")
        ] = None,
        caller_stall_s: Annotated[
            float | None, typer.Option(help="Seconds a router may read nothing.")
        ] = None,
        drain_s: Annotated[
            float | None, typer.Option(help="Seconds SIGTERM leaves running requests.")
        ] = None,
        config: Annotated[Path | None, typer.Option(help="TOML file; flags beat it.")] = None,
        log_level: Annotated[
            str | None, typer.Option(help="debug, info, warning or error.")
        ] = None,
        log_style: Annotated[str | None, typer.Option(help="human or json.")] = None,
        otel_endpoint: Annotated[
            str | None, typer.Option(help="URL of an OTLP collector; traces go there.")
        ] = None,
        check_settings: Annotated[
            bool | None,
            typer.Option("--check-settings", help="Say whether the settings fit, and end."),
        ] = None,
    ) -> None:
        given = locals()
        flags = {name: given[name] for name in WorkerConfig.model_fields if name in given}
        try:
            flags["rank"] = number_from_environment("RANK") if rank is None else rank
            flags["world_size"] = (
                number_from_environment("WORLD_SIZE") if world_size is None else world_size
            )
            flags["leader"] = leader or leader_from_environment()
        except ConfigError as error:
            report_end(f"{role_name}: {error}")
            sys.exit(EXIT_CONFIG)
        if check_settings:
            sys.exit(_checked(role_name, flags, config))
        # Read by torch's allocator when it loads: huge pages make weights about a fifth faster to
        # stream.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        sys.exit(_started(role_name, lambda: start(flags, config)))

    return app


def _started(role_name: str, start: Callable[[], int]) -> int:
    """Return the exit code of `start`, also where there is no memory for what it imports."""
    try:
        return start()
    except (ImportError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        report_end(f"{role_name}: out of memory before it could load anything; {memory_left()}")
        return EXIT_FAILED


def _checked(role_name: str, flags: dict[str, object], file: Path | None) -> int:
    """The exit code of `--check-settings`, and a line to stderr where they do not fit. Loads no
    torch."""
    try:
        load(WorkerConfig, section=role_name, flags=flags, file=file).check()
    except ConfigError as error:
        print(f"{role_name}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0
