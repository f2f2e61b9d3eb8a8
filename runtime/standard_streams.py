"""The standard streams of a command, whatever the locale says.

    open_to_all_text()                                       once, before the first line is read or written
"""

import codecs
import io
import sys

# What the commands draw with, for encodings that lack it.
_DRAWN = str.maketrans("│├┼┤─█░", "||||-#.")


def open_to_all_text() -> None:
    """Let stdout and stderr write text that their encoding lacks: frames become ASCII, everything else is escaped as in
    a Python string. ASCII on stdin is read as UTF-8, which it is a part of, and bytes that are no text are an error
    there in every locale."""
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
    text = error.object[error.start:error.end].translate(_DRAWN)
    return text.encode("ascii", "backslashreplace").decode(), error.end
