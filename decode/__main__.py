"""Entry point of `python -m decode`: one process of a decode pool."""

from pathlib import Path

from runtime.process.quiet import quiet_grpc


def _start(flags: dict[str, object], file: Path | None) -> int:
    # Torch is imported here, after --help is handled and the environment is prepared.
    from decode.worker import DecodeRole
    from pool.start import start

    return start(DecodeRole(), flags, file, name="decode")


def main() -> None:
    """Run the command line."""
    quiet_grpc()
    from pool.main import worker_command  # imports grpc

    worker_command("decode", _start)(prog_name="baton decode")


if __name__ == "__main__":
    main()
