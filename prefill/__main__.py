"""`python -m prefill`: one process of a prefill pool."""

from pathlib import Path

from runtime.process.quiet import quiet_grpc


def _start(flags: dict[str, object], file: Path | None) -> int:
    # Torch loads here, after --help has been answered and the environment prepared.
    from pool.start import start
    from prefill.worker import PrefillRole

    return start(PrefillRole(), flags, file)


def main() -> None:
    """The entry point."""
    quiet_grpc()
    from pool.main import worker_command  # loads grpc

    worker_command("prefill", _start)(prog_name="baton prefill")


if __name__ == "__main__":
    main()
