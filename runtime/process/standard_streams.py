"""Standard streams of a command, independent of the locale.

open_to_all_text()                                       once, before the first line is read or
written with whole_output("baton check"): ...                    one line and exit code 1 if a disk
is full
"""

import codecs
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import UnavailableError

# ASCII substitutes for the characters with which commands draw, for encodings without them.
_DRAWN = str.maketrans("│├┼┤─█░", "||||-#.")


def open_to_all_text() -> None:
    """Make stdout and stderr accept text that their encoding lacks, and read stdin as UTF-8.

    Frames become ASCII; any other character is escaped as in a Python string. An ASCII stdin is
    read as UTF-8, its superset. Bytes that are not text are an error on stdin in every locale.
    """
    codecs.register_error("baton.drawn", _drawn)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed stream is None
            stream.reconfigure(errors="baton.drawn")
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else sys.stdin.encoding, errors="strict")


def _drawn(error: UnicodeError) -> tuple[str, int]:
    """Replace unencodable text, as `codecs.register_error` requires. Raises decoding errors again."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_DRAWN)
    return text.encode("ascii", "backslashreplace").decode(), error.end


@contextmanager
def reporting_full_disk() -> Iterator[None]:
    """Raise UnavailableError if a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_the_rest()
        raise UnavailableError(
            f"cannot write {error.filename or 'the output'}: {error.strerror}"
        ) from None


@contextmanager
def whole_output(name: str) -> Iterator[None]:
    """Run a program and report output that could not be written.

    Exits with one line if a disk did not take all of the output, and silently if its reader is
    gone.
    """
    try:
        with reporting_full_disk():
            try:
                yield
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except UnavailableError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        _discard_the_rest()
        sys.exit(1)


def _discard_the_rest() -> None:
    """Redirect the remaining output to the null device.

    Otherwise the flush at the end of the process would fail again and print a traceback.
    """
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
