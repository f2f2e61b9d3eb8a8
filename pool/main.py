"""Command line of a worker process, shared by `python -m prefill` and `python -m decode`."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from pool.stage.config import WorkerConfig
from runtime.config import leader_from_environment, load, number_from_environment
from runtime.config_flags import Flags, flags_of
from runtime.errors import ConfigError
from runtime.observe.log import report_end
from runtime.process.host_memory import is_out_of_memory, memory_left
from runtime.process.supervision import EXIT_CONFIG

ENVIRONMENT_HELP = (
    "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are used when the flags are absent."
)


Start = Callable[[dict[str, object], Path | None], int]


def worker_command(
    role_name: str, start: Start, settings: type[WorkerConfig] = WorkerConfig
) -> typer.Typer:
    """Return the command of a role.

    `start(flags, file)` runs the role and returns the exit code. It may import torch; this module
    does not.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command(help=f"Run one process of a {role_name} pool. {ENVIRONMENT_HELP}")
    @flags_of(settings, section=role_name)
    def run(given: Flags, file: Path | None, checks_only: bool) -> None:  # noqa: FBT001
        try:
            flags = {**given, **_from_environment(given)}
        except ConfigError as error:
            report_end(f"{role_name}: {error}")
            sys.exit(EXIT_CONFIG)
        if checks_only:
            sys.exit(_checked(role_name, settings, flags, file))
        # Torch's allocator reads it at import: huge pages let weights stream about a fifth faster.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        sys.exit(_started(role_name, lambda: start(flags, file)))

    return app


def _from_environment(flags: Flags) -> dict[str, object]:
    """Return what launchers set by variables, for flags that were not given. Raises ConfigError."""
    rank = flags["rank"]
    world_size = flags["world_size"]
    return {
        "rank": number_from_environment("RANK") if rank is None else rank,
        "world_size": number_from_environment("WORLD_SIZE") if world_size is None else world_size,
        "leader": flags["leader"] or leader_from_environment(),
    }


def _started(role_name: str, start: Callable[[], int]) -> int:
    """Return the exit code of `start`, also if memory is too short for its imports."""
    try:
        return start()
    except (ImportError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        report_end(f"{role_name}: out of memory before it could load anything; {memory_left()}")
        return EXIT_CONFIG


def _checked(
    role_name: str, settings: type[WorkerConfig], flags: dict[str, object], file: Path | None
) -> int:
    """Run `--check-settings`: return the exit code, and print settings errors to stderr.

    Does not import torch.
    """
    try:
        load(settings, section=role_name, flags=flags, file=file).check()
    except ConfigError as error:
        print(f"{role_name}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0
