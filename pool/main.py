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
    "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are used when the flags are absent."
)


Start = Callable[[dict[str, object], Path | None], int]


def worker_command(role_name: str, start: Start) -> typer.Typer:
    """Return the command of a role.

    `start(flags, file)` runs the role and returns the exit code. It may import torch; this module
    does not.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command(help=f"Run one process of a {role_name} pool. {ENVIRONMENT_HELP}")
    def run(
        model: Annotated[Path | None, typer.Option(help="Directory of the checkpoint.")] = None,
        model_name: Annotated[str | None, typer.Option(help="Model name that clients use.")] = None,
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
        rank: Annotated[
            int | None, typer.Option(help="Process of the pool; 0: the leader.")
        ] = None,
        world_size: Annotated[int | None, typer.Option(help="Processes of the pool.")] = None,
        tp: Annotated[
            int | None, typer.Option(help="Ranks (processes) that share each stage.")
        ] = None,
        ep: Annotated[
            int | None, typer.Option(help="Ranks that experts are spread over: --tp.")
        ] = None,
        dp_attention: Annotated[
            int | None, typer.Option(help="Data ranks that share the stage's ranks.")
        ] = None,
        overlap_tokens: Annotated[
            int | None, typer.Option(help="Split batches of N tokens in two (--tp).")
        ] = None,
        overlap_steps: Annotated[
            bool | None, typer.Option(help="Prepare a step during the previous one.")
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
            int | None, typer.Option(help="Tokens of prompt and output; 0: the model's.")
        ] = None,
        max_running: Annotated[
            int | None, typer.Option(help="Requests that compute at a time.")
        ] = None,
        max_landing: Annotated[
            int | None, typer.Option(help="More requests in handoff; 0: automatic.")
        ] = None,
        max_queued: Annotated[int | None, typer.Option(help="Prompts that may be queued.")] = None,
        chunk_tokens: Annotated[int | None, typer.Option(help="Prompt tokens per forward.")] = None,
        prefix_cache: Annotated[
            bool | None, typer.Option(help="Cache prompt prefixes (prefill).")
        ] = None,
        decode_cache: Annotated[
            bool | None, typer.Option(help="Cache prompt prefixes (decode).")
        ] = None,
        local_rest_tokens: Annotated[
            int | None, typer.Option(help="Most uncached tokens to prefill (decode).")
        ] = None,
        prefix_snapshots: Annotated[
            int | None, typer.Option(help="Cached recurrent states; 0: automatic.")
        ] = None,
        step_limit_s: Annotated[
            float | None, typer.Option(help="Seconds a step may take; 0: automatic.")
        ] = None,
        numerics: Annotated[str | None, typer.Option(help="exact or fast.")] = None,
        weights: Annotated[
            str | None, typer.Option(help="model or int8: eight bits a weight.")
        ] = None,
        device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
        cuda_graphs: Annotated[bool | None, typer.Option(help="Run steps as CUDA graphs.")] = None,
        threads: Annotated[int | None, typer.Option(help="Compute threads.")] = None,
        transport: Annotated[
            str | None, typer.Option(help="UCX profile: auto, shm, tcp or cuda.")
        ] = None,
        transport_interface: Annotated[
            str | None, typer.Option(help="Network devices for UCX to listen on.")
        ] = None,
        transport_ports: Annotated[
            str | None, typer.Option(help="TCP ports for UCX, LOW-HIGH.")
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
        spec_steps: Annotated[int | None, typer.Option(help="Most tokens drafted ahead.")] = None,
        spec_draft_tokens: Annotated[
            int | None, typer.Option(help="Drafted tokens per step and request.")
        ] = None,
        spec_prompt: Annotated[
            bool | None, typer.Option(help="Send the draft's state with prompts.")
        ] = None,
        spec_adaptive: Annotated[
            bool | None, typer.Option(help="Adapt draft length to throughput.")
        ] = None,
        caller_stall_s: Annotated[
            float | None, typer.Option(help="Seconds a router may not read.")
        ] = None,
        drain_s: Annotated[
            float | None, typer.Option(help="Seconds SIGTERM leaves running requests.")
        ] = None,
        config: Annotated[Path | None, typer.Option(help="TOML file; flags override it.")] = None,
        log_level: Annotated[
            str | None, typer.Option(help="debug, info, warning or error.")
        ] = None,
        log_style: Annotated[str | None, typer.Option(help="human or json.")] = None,
        otel_endpoint: Annotated[
            str | None, typer.Option(help="URL of an OTLP collector; traces go there.")
        ] = None,
        check_settings: Annotated[
            bool | None,
            typer.Option("--check-settings", help="Check the settings and exit."),
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
        # Torch's allocator reads it at import: huge pages let weights stream about a fifth faster.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        sys.exit(_started(role_name, lambda: start(flags, config)))

    return app


def _started(role_name: str, start: Callable[[], int]) -> int:
    """Return the exit code of `start`, also if memory is too short for its imports."""
    try:
        return start()
    except (ImportError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        report_end(f"{role_name}: out of memory before it could load anything; {memory_left()}")
        return EXIT_FAILED


def _checked(role_name: str, flags: dict[str, object], file: Path | None) -> int:
    """Run `--check-settings`: return the exit code, and print settings errors to stderr.

    Does not import torch.
    """
    try:
        load(WorkerConfig, section=role_name, flags=flags, file=file).check()
    except ConfigError as error:
        print(f"{role_name}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0
