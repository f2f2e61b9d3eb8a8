"""Entry point of `python -m worker`: one process of a pool that prefills, decodes, or does both."""

from pathlib import Path

from runtime.process.quiet import quiet_grpc


def _start(flags: dict[str, object], file: Path | None) -> int:
    # Torch is imported here, after --help is handled and the environment is prepared.
    from pool.start import start
    from worker.config import RolesConfig
    from worker.role import AggregatedRole

    return start(AggregatedRole(), flags, file, name="worker", settings=RolesConfig)


def main() -> None:
    """Run the command line."""
    quiet_grpc()
    from pool.main import worker_command  # imports grpc
    from worker.config import RolesConfig

    worker_command("worker", _start, RolesConfig)(prog_name="baton worker")


if __name__ == "__main__":
    main()
