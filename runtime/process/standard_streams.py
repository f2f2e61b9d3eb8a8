"""The standard streams of a command, whatever the locale says.

open_to_all_text()                                       once, before the first line is read or written
with whole_output("baton check"): ...                    one line and exit code 1 where a disk is full
"""

import codecs
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import UnavailableError

# What the commands draw with, for encodings that lack it.
_DRAWN = str.maketrans("│├┼┤─█░", "||||-#.")


def open_to_all_text() -> None:
    """Let stdout and stderr write text that their encoding lacks: frames become ASCII, everything
    else is escaped as in a Python string. ASCII on stdin is read as UTF-8, which it is a part of,
    and bytes that are no text are an error there in every locale."""
    codecs.register_error("baton.drawn", _drawn)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed one is None
            stream.reconfigure(errors="baton.drawn")
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else sys.stdin.encoding, errors="strict")


def _drawn(error: UnicodeError) -> tuple[str, int]:
    """Satisfies `codecs.register_error`. Raises what is not about encoding."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_DRAWN)
    return text.encode("ascii", "backslashreplace").decode(), error.end


@contextmanager
def told_of_full_disks() -> Iterator[None]:
    """Raise UnavailableError for what a disk did not take."""
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
    """Run a program, and exit with one line where a disk did not take all of its output, in silence
    where its reader is gone."""
    try:
        with told_of_full_disks():
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
    """Write what is left of the output to nowhere: it would fail once more, and loudly, as the
    process ends."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
