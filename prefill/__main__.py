"""Entry point of `python -m prefill`: one process of a prefill pool."""

from pathlib import Path

from runtime.process.quiet import quiet_grpc


def _start(flags: dict[str, object], file: Path | None) -> int:
    # Torch is imported here, after --help is handled and the environment is prepared.
    from pool.start import start
    from prefill.worker import PrefillRole

    return start(PrefillRole(), flags, file, name="prefill")


def main() -> None:
    """Run the command line."""
    quiet_grpc()
    from pool.main import worker_command  # imports grpc

    worker_command("prefill", _start)(prog_name="baton prefill")


if __name__ == "__main__":
    main()
