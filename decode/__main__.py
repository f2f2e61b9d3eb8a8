"""`python -m decode`: one process of a decode pool."""

from pathlib import Path

from pool.main import worker_command


def _start(flags: dict[str, object], file: Path | None) -> int:
    # Torch loads here, after --help has been answered and the environment prepared.
    from decode.worker import DecodeRole
    from pool.start import start

    return start(DecodeRole(), flags, file)


if __name__ == "__main__":
    worker_command("decode", _start)()
